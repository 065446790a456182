// unscale_norm: y = x·scale, its sum of squares and its finite check, in one pass; y is written on request.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

struct Nothing {};  // the output type of a pass that only reads

// The sum over one chunk: sixteen double lanes, element i in lane i % 16, then the lanes' fixed tree.
template <class Out, class In>
double unscale_norm_kernel(Out* out, const In* in, int64_t n, F32x16 scale, bool streaming) {
  F64x16 sums = zero_sums();
  auto step = [&](int64_t i, auto access) {
    F32x16 y = mul(access.load(in + i), scale);
    if constexpr (!__is_same(Out, Nothing)) {
      const Packed<Out> stored = pack<Out>(y);
      access.store(out + i, stored);
      y = widen(stored);
    }
    add_squares(sums, access.trim(y));
  };
  sweep(out, n, streaming, step);
  return sum_lanes(sums);
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
  const bool large = !__is_same(Out, Nothing) && worth_streaming<Out>(layout);
  for_each_chunk(layout, [&](const Chunk& chunk) {
    const In* in = in_tensor<const In>(call.tensors, chunk);
    Out* out = __is_same(Out, Nothing) ? nullptr : in_tensor<Out>(call.out, chunk);
    double& partial = call.partials[&chunk - layout.chunks];
    if (!in) {
      partial = 0;
    } else if (!__is_same(Out, Nothing) && !out) {
      partial = unscale_norm_kernel(static_cast<Nothing*>(nullptr), in, chunk.count, scale, false);
    } else {
      const bool streaming = large && can_stream(out) && static_cast<const void*>(out) != in;
      partial = unscale_norm_kernel(out, in, chunk.count, scale, streaming);
    }
  });
}

// The square of a finite float cannot overflow a double, so a slot's sum is finite exactly when the slot is.
void finish_slots(const Layout& layout, const UnscaleNormCall& call) {
  for (int64_t slot = 0; slot < layout.num_slots; ++slot) {
    double sum = 0;
    for (int64_t c = layout.first_chunk[slot]; c < layout.first_chunk[slot + 1]; ++c) sum += call.partials[c];
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
