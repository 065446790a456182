// accumulate: acc = s·g or acc += s·g in fp32. accumulate_cast: adds the window's last micro-batch and casts
// the sum to the wire's dtype.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

// mul then add, with two roundings and never fused, because the reference and every instruction set must
// agree.
template <bool kFirst, class Grad>
bool accumulate_kernel(float* acc, const Grad* grad, int64_t n, F32x16 scale, bool streaming) {
  Largest<float> largest;
  sweep(acc, n, streaming, [&](int64_t i, auto access) PYENGINE_INLINE {
    F32x16 term = mul(access.load(grad + i), scale);
    largest.see(access.trim(pack<float>(term)));
    if constexpr (!kFirst) term = add(access.load(acc + i), term);
    access.store(acc + i, pack<float>(term));
  });
  return !largest.is_finite();
}

void zero_kernel(float* acc, int64_t n, bool streaming) {
  sweep(acc, n, streaming, [&](int64_t i, auto access) PYENGINE_INLINE { access.store(acc + i, pack<float>(splat(0))); });
}

// Without kAcc, this is the first micro-batch; without kGrad, the parameter has no gradient. The flag refers
// to the value on the wire, because a cast to fp16 may overflow.
template <bool kAcc, bool kGrad, class Wire, class Grad>
bool accumulate_cast_kernel(Wire* wire, const float* acc, const Grad* grad, int64_t n, F32x16 grad_scale,
                            F32x16 wire_scale, bool streaming) {
  Largest<Wire> largest;
  sweep(wire, n, streaming, [&](int64_t i, auto access) PYENGINE_INLINE {
    F32x16 sum = splat(0);
    if constexpr (kGrad) sum = mul(access.load(grad + i), grad_scale);
    if constexpr (kAcc && kGrad) sum = add(access.load(acc + i), sum);
    if constexpr (kAcc && !kGrad) sum = access.load(acc + i);
    if constexpr (kAcc || kGrad) sum = mul(sum, wire_scale);
    const Packed<Wire> y = pack<Wire>(sum);
    largest.see(access.trim(y));
    access.store(wire + i, y);
  });
  return !largest.is_finite();
}

// ---- dispatch ----

template <class Grad>
void accumulate_typed(const Layout& layout, const AccumulateCall& call) {
  const F32x16 scale = splat(*call.scale);
  const bool streaming = call.first && worth_streaming<float>(layout);
  for_each_chunk(layout, [&](const Chunk& chunk) {
    float* acc = in_flat(call.acc, layout, chunk);
    const Grad* grad = in_tensor<const Grad>(call.grads, chunk);
    bool failed = false;
    if (!grad) {
      if (call.first) zero_kernel(acc, chunk.count, streaming);
    } else if (call.first) {
      failed = accumulate_kernel<true>(acc, grad, chunk.count, scale, streaming);
    } else {
      failed = accumulate_kernel<false>(acc, grad, chunk.count, scale, streaming);
    }
    if (failed) raise_flag(call.nonfinite + chunk.slot);
  });
}

template <class Wire, class Grad>
void accumulate_cast_typed(const Layout& layout, const AccumulateCastCall& call) {
  const F32x16 grad_scale = splat(*call.grad_scale), wire_scale = splat(*call.wire_scale);
  // In place, the lines are already in the cache, and streaming stores would evict them.
  const bool streaming = call.wire.data != call.acc && worth_streaming<Wire>(layout);
  for_each_chunk(layout, [&](const Chunk& chunk) {
    Wire* wire = in_flat(as<Wire>(call.wire.data), layout, chunk);
    const float* acc = in_flat(call.acc, layout, chunk);
    const Grad* grad = in_tensor<const Grad>(call.grads, chunk);
    auto kernel = call.first ? (grad ? accumulate_cast_kernel<false, true, Wire, Grad>
                                     : accumulate_cast_kernel<false, false, Wire, Grad>)
                             : (grad ? accumulate_cast_kernel<true, true, Wire, Grad>
                                     : accumulate_cast_kernel<true, false, Wire, Grad>);
    if (kernel(wire, acc, grad, chunk.count, grad_scale, wire_scale, streaming))
      raise_flag(call.nonfinite + chunk.slot);
  });
}

}  // namespace

// ---- entry points ----

void accumulate_cpu(const Layout& layout, const AccumulateCall& call) {
  with_type(call.grads.dtype, [&](auto grad_t) { accumulate_typed<decltype(grad_t)>(layout, call); });
}

void accumulate_cast_cpu(const Layout& layout, const AccumulateCastCall& call) {
  with_types(call.wire.dtype, call.grads.dtype, [&](auto wire_t, auto grad_t) {
    accumulate_cast_typed<decltype(wire_t), decltype(grad_t)>(layout, call);
  });
}

}  // namespace pyengine::PYENGINE_ISA
