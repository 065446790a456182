// unscale_norm: y = x·scale, its sum of squares and its finite check, in one pass; y is written on request.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

struct Nothing {};  // the output type of a pass that only reads

// One block's sum: element i adds to double lane i % 16, and the lanes have a fixed tree.
template <class Out, class In>
struct Block {
  Out* out;
  const In* in;
  F32x16 scale;
  F64x16 sums = zero_sums();

  template <class Access>
  PYENGINE_INLINE void step(int64_t i, Access access) {
    F32x16 y = mul(access.load(in + i), scale);
    if constexpr (!__is_same(Out, Nothing)) {
      const Packed<Out> stored = pack<Out>(y);
      access.store(out + i, stored);
      y = widen(stored);
    }
    add_squares(sums, widen(access.trim(pack<float>(y))));
  }
};

// A block that is only read, unscaled: what a norm alone needs.
template <class In>
struct PlainBlock {
  const In* in;
  F64x16 sums = zero_sums();

  PYENGINE_INLINE void step(int64_t i, Full) { add_squares_at(sums, in + i); }
  PYENGINE_INLINE void step(int64_t i, Some some) { add_squares(sums, some.load(in + i)); }
};

// Both blocks of a chunk, side by side: one alone waits for its own additions.
template <class B, class Access>
void sum_blocks(B first, B second, int64_t n, Access access, double* partial) {
  const int64_t n1 = n < kBlockElements ? n : kBlockElements, n2 = n - n1;
  int64_t i = 0;
  for (; i + kLanes <= n2; i += kLanes) {
    first.step(i, access);
    second.step(i, access);
  }
  if (i < n2) second.step(i, Some{n2 - i});
  for (; i + kLanes <= n1; i += kLanes) first.step(i, access);
  if (i < n1) first.step(i, Some{n1 - i});
  partial[0] = sum_lanes(first.sums);
  partial[1] = sum_lanes(second.sums);
}

template <class Out, class In, class Access>
void unscale_norm_kernel(Out* out, const In* in, int64_t n, F32x16 scale, Access access, double* partial) {
  Out* second_out = out;
  if constexpr (!__is_same(Out, Nothing)) second_out += kBlockElements;
  sum_blocks(Block<Out, In>{out, in, scale}, Block<Out, In>{second_out, in + kBlockElements, scale}, n, access, partial);
}

// ---- dispatch ----

// Lanes are anchored at the slot's start, so a head of another length may not shift them: stream only to
// destinations that need no head.
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

// Blocks are added in order. The square of a finite float cannot overflow a double, so a slot's sum is finite exactly when the slot is.
void finish_slots(const Layout& layout, const UnscaleNormCall& call) {
  for (int64_t slot = 0; slot < layout.num_slots; ++slot) {
    double sum = 0;
    const double* last = call.partials + 2 * layout.first_chunk[slot + 1];
    for (const double* p = call.partials + 2 * layout.first_chunk[slot]; p != last; ++p) sum += *p;
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
