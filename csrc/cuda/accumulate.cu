// accumulate: acc = s·g or acc += s·g in fp32. accumulate_cast: the window's last micro-batch, cast to the wire's type.
#include "launch.cuh"
#include "sweep.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

// No kernel reads the gradients again: ReadOnce leaves the L2 to acc and the wire, which are read next.
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
accumulate_kernel(const __grid_constant__ DeviceLayout layout, float* flat, const __grid_constant__ Table grads,
                  const float* scale_at, uint8_t* nonfinite) {
  const float scale = load_now(scale_at);
  const DeviceChunk chunk = layout.chunks[blockIdx.x];
  const int count = chunk.count;
  float* acc = in_flat(flat, chunk);
  const Grad* grad = in_tensor<const Grad>(grads, chunk);
  if (!grad) {
    if constexpr (kFirst) fill_zeros(acc, count);
    return;
  }
  Accumulate<kFirst, Grad> op{acc, grad, scale};
  sweep(op, count, acc, grad);
  op.check.raise(nonfinite + chunk.slot);
}

// Without kAcc it is the first micro-batch, without kGrad a parameter without a gradient. The flag checks the value on
// the wire: a cast to fp16 may overflow.
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
accumulate_cast_kernel(const __grid_constant__ DeviceLayout layout, Wire* flat_wire, const float* flat_acc,
                       const __grid_constant__ Table grads, const float* grad_scale_at,
                       const float* wire_scale_at, uint8_t* nonfinite) {
  const float grad_scale = load_now(grad_scale_at), wire_scale = load_now(wire_scale_at);
  const DeviceChunk chunk = layout.chunks[blockIdx.x];
  const int count = chunk.count;
  Wire* wire = in_flat(flat_wire, chunk);
  const float* acc = in_flat(flat_acc, chunk);
  const Grad* grad = in_tensor<const Grad>(grads, chunk);
  if (grad) {
    AccumulateCast<!kFirst, true, Wire, Grad> op{wire, acc, grad, grad_scale, wire_scale};
    if constexpr (kFirst) sweep(op, count, wire, grad);
    else sweep(op, count, wire, acc, grad);
    op.check.raise(nonfinite + chunk.slot);
  } else if constexpr (kFirst) {
    fill_zeros(wire, count);
  } else {
    AccumulateCast<true, false, Wire, Grad> op{wire, acc, nullptr, 0, wire_scale};
    sweep(op, count, wire, acc);
    op.check.raise(nonfinite + chunk.slot);
  }
}

// ---- dispatch ----

template <bool kFirst, class Grad>
void accumulate_typed(const DeviceLayout& layout, void* stream, const AccumulateCall& call) {
  with_table(call.grads, layout.num_slots, [&](const auto& grads) {
    launch<accumulate_kernel<kFirst, Grad, Bare<decltype(grads)>>>(
        "accumulate_", layout.num_chunks, kThreads, stream, layout, call.acc, grads, call.scale, call.nonfinite);
  });
}

template <bool kFirst, class Wire, class Grad>
void accumulate_cast_typed(const DeviceLayout& layout, void* stream, const AccumulateCastCall& call) {
  with_table(call.grads, layout.num_slots, [&](const auto& grads) {
    launch<accumulate_cast_kernel<kFirst, Wire, Grad, Bare<decltype(grads)>>>(
        "accumulate_cast_", layout.num_chunks, kThreads, stream, layout, as<Wire>(call.wire.data), call.acc, grads,
        call.grad_scale, call.wire_scale, call.nonfinite);
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
