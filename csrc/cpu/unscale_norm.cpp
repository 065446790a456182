// unscale_norm: y = x·scale, its sum of squares, and a check for nonfinite values, in one pass. Writing y is
// optional.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

struct Nothing {};  // the output type of a pass that only reads

// A pass over one block. Each step computes sixteen elements and their squares.
template <class Out, class In>
struct Block {
  Out* out;
  const In* in;
  F32x16 scale;

  template <class Access>
  PYENGINE_INLINE void step(int64_t i, Access access, F64x16& sums) const {
    F32x16 y = mul(access.load(in + i), scale);
    if constexpr (!__is_same(Out, Nothing)) {
      const Packed<Out> stored = pack<Out>(y);
      access.store(out + i, stored);
      y = widen(stored);
    }
    add_squares(sums, widen(access.trim(pack<float>(y))));
  }
};

// A block that is only read, to compute a norm, if the scale is 1.
template <class In>
struct PlainBlock {
  const In* in;

  PYENGINE_INLINE void step(int64_t i, Full, F64x16& sums) const { add_squares_at(sums, in + i); }
  PYENGINE_INLINE void step(int64_t i, Some some, F64x16& sums) const { add_squares(sums, some.load(in + i)); }
};

// Adds the segment [begin, end) of one block.
template <class B, class Access>
PYENGINE_INLINE inline void add_segment(const B& block, int64_t begin, int64_t end, Access access, F64x16& sums) {
  F64x16 segment = zero_sums();
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) block.step(i, access, segment);
  if (i < end) block.step(i, Some{end - i}, segment);
  sums = add(sums, segment);
}

// Sums the same segment of two blocks in one interleaved loop: with a single segment, each addition would
// have to wait for the previous one. The registers hold both segments, but not the sums of the blocks, which
// are updated only once every sixteen steps.
template <class B, class Access>
PYENGINE_INLINE inline void add_segments(const B& first, const B& second, int64_t begin, Access access,
                                         F64x16& first_sums, F64x16& second_sums) {
  F64x16 first_segment = zero_sums(), second_segment = zero_sums();
  for (int64_t i = begin; i < begin + kSegmentElements; i += kLanes) {
    first.step(i, access, first_segment);
    second.step(i, access, second_segment);
  }
  first_sums = add(first_sums, first_segment);
  second_sums = add(second_sums, second_segment);
}

// Sums both blocks of a chunk of n elements.
template <class B, class Access>
void sum_blocks(B first, B second, int64_t n, Access access, double* partial) {
  const int64_t n1 = n < kBlockElements ? n : kBlockElements, n2 = n - n1;
  F64x16 sums1 = zero_sums(), sums2 = zero_sums();
  int64_t i = 0;
  for (; i + kSegmentElements <= n2; i += kSegmentElements) add_segments(first, second, i, access, sums1, sums2);
  if (i < n2) add_segment(second, i, n2, access, sums2);
  for (; i + kSegmentElements <= n1; i += kSegmentElements) add_segment(first, i, i + kSegmentElements, access, sums1);
  if (i < n1) add_segment(first, i, n1, access, sums1);
  partial[0] = sum_lanes(sums1);
  partial[1] = sum_lanes(sums2);
}

template <class Out, class In, class Access>
void unscale_norm_kernel(Out* out, const In* in, int64_t n, F32x16 scale, Access access, double* partial) {
  Out* second_out = out;
  if constexpr (!__is_same(Out, Nothing)) second_out += kBlockElements;
  sum_blocks(Block<Out, In>{out, in, scale}, Block<Out, In>{second_out, in + kBlockElements, scale}, n, access, partial);
}

// ---- dispatch ----

// Lanes start at the slot's first element and must not be shifted by an unaligned head, so stream only to
// destinations without a head.
template <class T>
bool can_stream(const T* out) {
  return reinterpret_cast<uint64_t>(out) % (kLanes * sizeof(T)) == 0;
}

template <class Out, class In>
void unscale_norm_typed(const Layout& layout, const UnscaleNormCall& call) {
  const F32x16 scale = splat(*call.scale);
  for_each_chunk(layout, [&](const Chunk& chunk) {
    const In* in = in_tensor<const In>(call.tensors, chunk);
    double* partial = call.partials + 2 * (&chunk - layout.chunks);
    if (!in) {
      partial[0] = partial[1] = 0;
      return;
    }
    if constexpr (!__is_same(Out, Nothing)) {
      Out* out = in_tensor<Out>(call.out, chunk);
      const bool streaming = static_cast<const void*>(out) != in && worth_streaming<Out>(layout) && can_stream(out);
      if (out && streaming) return unscale_norm_kernel(out, in, chunk.count, scale, Streamed{}, partial);
      if (out) return unscale_norm_kernel(out, in, chunk.count, scale, Full{}, partial);
    }
    if (*call.scale == 1)
      return sum_blocks(PlainBlock<In>{in}, PlainBlock<In>{in + kBlockElements}, chunk.count, Full{}, partial);
    unscale_norm_kernel(static_cast<Nothing*>(nullptr), in, chunk.count, scale, Full{}, partial);
  });
}

// Computes a slot's sum from the sums of its n blocks, which are overwritten by the block lanes. Lanes
// without a block are skipped, because adding +0 does not change a sum of squares.
double sum_of_slot(double* block, int64_t n) {
  if (n == 0) return 0;
  for (int64_t b = kBlockLanes; b < n; ++b) block[b % kBlockLanes] += block[b];
  for (int64_t width = kBlockLanes / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width && i + width < n; ++i) block[i] += block[i + width];
  return block[0];
}

// The square of a finite float cannot overflow a double, so a slot's sum is finite exactly when the slot is.
void finish_slots(const Layout& layout, const UnscaleNormCall& call) {
  for (int64_t slot = 0; slot < layout.num_slots; ++slot) {
    const int64_t first = layout.first_chunk[slot], last = layout.first_chunk[slot + 1];
    const double sum = sum_of_slot(call.partials + 2 * first, 2 * (last - first));
    call.sumsq[slot] = sum;
    if (!__builtin_isfinite(sum)) raise_flag(call.nonfinite + slot);
  }
}

}  // namespace

// ---- entry points ----

void unscale_norm_cpu(const Layout& layout, const UnscaleNormCall& call) {
  with_type(call.tensors.dtype, [&](auto in_t) {
    using In = decltype(in_t);
    if (!call.out.data) return unscale_norm_typed<Nothing, In>(layout, call);
    with_type(call.out.dtype, [&](auto out_t) { unscale_norm_typed<decltype(out_t), In>(layout, call); });
  });
  finish_slots(layout, call);
}

}  // namespace pyengine::PYENGINE_ISA
