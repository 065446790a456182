// accumulate: acc = s·g or acc += s·g in fp32. accumulate_cast: adds the window's last micro-batch and casts
// the sum to the wire's dtype.
#include "launch.cuh"
#include "sweep.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

// No kernel reads the gradients again, so ReadOnce leaves the L2 cache to acc and the wire, which are read
// next.
template <bool kFirst, class Grad>
struct Accumulate {
  float* acc;
  const Grad* grad;
  float scale;
  FiniteCheck<float> check = {};

  template <int N>
  struct Loaded {
    Packed<Grad, N> grad;
    Packed<float, kFirst ? 0 : N> acc;
  };

  template <int N>
  __device__ __forceinline__ Loaded<N> load(int i) const {
    Loaded<N> x;
    x.grad = load_packed<N>(grad + i, ReadOnce{});
    if constexpr (!kFirst) x.acc = load_packed<N>(acc + i);
    return x;
  }

  template <int N>
  __device__ __forceinline__ void store(int i, const Loaded<N>& x) {
    Floats<N> term = widen(x.grad) * scale;
    check.see(narrow<float>(term));
    if constexpr (!kFirst) term = widen(x.acc) + term;
    store_packed(acc + i, narrow<float>(term));
  }
};

template <bool kFirst, class Grad, class Table>
__global__ void __launch_bounds__(kThreads)
accumulate_kernel(const __grid_constant__ DeviceLayout layout, Split split, float* flat,
                  const __grid_constant__ Table grads, const float* scale_at, uint8_t* nonfinite) {
  const float scale = load_now(scale_at);
  const Part part = split.part(layout);
  const int count = part.count;
  float* acc = flat + part.in_flat;
  const Grad* grad = in_tensor<const Grad>(grads, part.slot, part.in_tensor);
  if (!grad) {
    if constexpr (kFirst) fill_zeros(acc, count);
    return;
  }
  Accumulate<kFirst, Grad> op{acc, grad, scale};
  sweep(op, count, acc, grad);
  op.check.raise(nonfinite + part.slot);
}

// Without kAcc, this is the first micro-batch; without kGrad, the parameter has no gradient. The flag refers
// to the value on the wire, because a cast to fp16 may overflow.
template <bool kAcc, bool kGrad, class Wire, class Grad>
struct AccumulateCast {
  Wire* wire;
  const float* acc;
  const Grad* grad;
  float grad_scale, wire_scale;
  FiniteCheck<Wire> check = {};

  template <int N>
  struct Loaded {
    Packed<float, kAcc ? N : 0> acc;
    Packed<Grad, kGrad ? N : 0> grad;
  };

  template <int N>
  __device__ __forceinline__ Loaded<N> load(int i) const {
    Loaded<N> x;
    if constexpr (kAcc) x.acc = load_packed<N>(acc + i);
    if constexpr (kGrad) x.grad = load_packed<N>(grad + i, ReadOnce{});
    return x;
  }

  template <int N>
  __device__ __forceinline__ void store(int i, const Loaded<N>& x) {
    Floats<N> sum;
    if constexpr (kGrad) sum = widen(x.grad) * grad_scale;
    if constexpr (kAcc && kGrad) sum = widen(x.acc) + sum;
    if constexpr (kAcc && !kGrad) sum = widen(x.acc);
    const Packed<Wire, N> y = narrow<Wire>(sum * wire_scale);
    check.see(y);
    store_packed(wire + i, y);
  }
};

template <bool kFirst, class Wire, class Grad, class Table>
__global__ void __launch_bounds__(kThreads)
accumulate_cast_kernel(const __grid_constant__ DeviceLayout layout, Split split, Wire* flat_wire,
                       const float* flat_acc, const __grid_constant__ Table grads, const float* grad_scale_at,
                       const float* wire_scale_at, uint8_t* nonfinite) {
  const float grad_scale = load_now(grad_scale_at), wire_scale = load_now(wire_scale_at);
  const Part part = split.part(layout);
  const int count = part.count;
  Wire* wire = flat_wire + part.in_flat;
  const float* acc = flat_acc + part.in_flat;
  const Grad* grad = in_tensor<const Grad>(grads, part.slot, part.in_tensor);
  if (grad) {
    AccumulateCast<!kFirst, true, Wire, Grad> op{wire, acc, grad, grad_scale, wire_scale};
    if constexpr (kFirst) sweep(op, count, wire, grad);
    else sweep(op, count, wire, acc, grad);
    op.check.raise(nonfinite + part.slot);
  } else if constexpr (kFirst) {
    fill_zeros(wire, count);
  } else {
    AccumulateCast<true, false, Wire, Grad> op{wire, acc, nullptr, 0, wire_scale};
    sweep(op, count, wire, acc);
    op.check.raise(nonfinite + part.slot);
  }
}

// ---- dispatch ----

template <bool kFirst, class Grad>
void accumulate_typed(const DeviceLayout& layout, void* stream, const AccumulateCall& call) {
  const Split split(layout, kPass<Accumulate<kFirst, Grad>, float>);
  with_table(call.grads, layout.num_slots, [&](const auto& grads) {
    launch<accumulate_kernel<kFirst, Grad, Bare<decltype(grads)>>>(
        "accumulate_", split.num_parts(layout), kThreads, stream, layout, split, call.acc, grads, call.scale,
        call.nonfinite);
  });
}

template <bool kFirst, class Wire, class Grad>
void accumulate_cast_typed(const DeviceLayout& layout, void* stream, const AccumulateCastCall& call) {
  const Split split(layout, kPass<AccumulateCast<!kFirst, true, Wire, Grad>, Wire>);
  with_table(call.grads, layout.num_slots, [&](const auto& grads) {
    launch<accumulate_cast_kernel<kFirst, Wire, Grad, Bare<decltype(grads)>>>(
        "accumulate_cast_", split.num_parts(layout), kThreads, stream, layout, split, as<Wire>(call.wire.data),
        call.acc, grads, call.grad_scale, call.wire_scale, call.nonfinite);
  });
}

}  // namespace

// ---- entry points ----

void accumulate_cuda(const DeviceLayout& layout, void* stream, const AccumulateCall& call) {
  if (layout.num_chunks == 0) return;
  with_type(call.grads.dtype, [&](auto grad_t) {
    using Grad = decltype(grad_t);
    if (call.first) accumulate_typed<true, Grad>(layout, stream, call);
    else accumulate_typed<false, Grad>(layout, stream, call);
  });
}

void accumulate_cast_cuda(const DeviceLayout& layout, void* stream, const AccumulateCastCall& call) {
  if (layout.num_chunks == 0) return;
  with_types(call.wire.dtype, call.grads.dtype, [&](auto wire_t, auto grad_t) {
    using Wire = decltype(wire_t);
    using Grad = decltype(grad_t);
    if (call.first) accumulate_cast_typed<true, Wire, Grad>(layout, stream, call);
    else accumulate_cast_typed<false, Wire, Grad>(layout, stream, call);
  });
}

}  // namespace pyengine
