// pack and unpack: flat[slot] = cast(tensor * scale), and the reverse.
#include "launch.cuh"
#include "sweep.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

template <class Dst, class Src>
struct ScaleCast {
  Dst* dst;
  const Src* src;
  float scale;

  template <int N>
  __device__ __forceinline__ Packed<Src, N> load(int i) const { return load_packed<N>(src + i); }
  template <int N>
  __device__ __forceinline__ void store(int i, const Packed<Src, N>& x) const {
    store_packed(dst + i, narrow<Dst>(widen(x) * scale));
  }
};

template <class Dst, class Src>
__device__ __forceinline__ void scale_cast(Dst* dst, const Src* src, int count, float scale) {
  ScaleCast<Dst, Src> op{dst, src, scale};
  sweep(op, count, dst, src);
}

template <class FlatT, class TensorT, class Table>
__global__ void __launch_bounds__(kThreads)
pack_kernel(const __grid_constant__ DeviceLayout layout, Split split, FlatT* flat,
            const __grid_constant__ Table tensors, const float* scale_at, const float* only_if) {
  if (only_if && load_now(only_if) == 0) return;  // the same for every thread of the grid
  const float scale = load_now(scale_at);
  const Part part = split.part(layout);
  FlatT* dst = flat + part.in_flat;
  const TensorT* src = in_tensor<const TensorT>(tensors, part.slot, part.in_tensor);
  if (src) scale_cast(dst, src, part.count, scale);
  else fill_zeros(dst, part.count);
}

template <class TensorT, class FlatT, class Table>
__global__ void __launch_bounds__(kThreads)
unpack_kernel(const __grid_constant__ DeviceLayout layout, Split split, const __grid_constant__ Table tensors,
              const FlatT* flat, const float* scale_at, const float* only_if) {
  if (only_if && load_now(only_if) == 0) return;
  const float scale = load_now(scale_at);
  const Part part = split.part(layout);
  TensorT* dst = in_tensor<TensorT>(tensors, part.slot, part.in_tensor);
  if (dst) scale_cast(dst, flat + part.in_flat, part.count, scale);
}

// ---- dispatch ----

template <class FlatT, class TensorT>
void pack_typed(const DeviceLayout& layout, void* stream, const PackCall& call) {
  const Split split(layout, kPass<ScaleCast<FlatT, TensorT>, FlatT>);
  with_table(call.tensors, layout.num_slots, [&](const auto& tensors) {
    launch<pack_kernel<FlatT, TensorT, Bare<decltype(tensors)>>>("pack_", split.num_parts(layout), kThreads, stream,
                                                                 layout, split, as<FlatT>(call.flat.data), tensors,
                                                                 call.scale, call.only_if);
  });
}

template <class FlatT, class TensorT>
void unpack_typed(const DeviceLayout& layout, void* stream, const PackCall& call) {
  const Split split(layout, kPass<ScaleCast<TensorT, FlatT>, TensorT>);
  with_table(call.tensors, layout.num_slots, [&](const auto& tensors) {
    launch<unpack_kernel<TensorT, FlatT, Bare<decltype(tensors)>>>(
        "unpack_", split.num_parts(layout), kThreads, stream, layout, split, tensors, as<const FlatT>(call.flat.data),
        call.scale, call.only_if);
  });
}

}  // namespace

// ---- entry points ----

void pack_cuda(const DeviceLayout& layout, void* stream, const PackCall& call) {
  if (layout.num_chunks == 0) return;
  with_types(call.flat.dtype, call.tensors.dtype, [&](auto flat_t, auto tensor_t) {
    pack_typed<decltype(flat_t), decltype(tensor_t)>(layout, stream, call);
  });
}

void unpack_cuda(const DeviceLayout& layout, void* stream, const PackCall& call) {
  if (layout.num_chunks == 0) return;
  with_types(call.flat.dtype, call.tensors.dtype, [&](auto flat_t, auto tensor_t) {
    unpack_typed<decltype(flat_t), decltype(tensor_t)>(layout, stream, call);
  });
}

}  // namespace pyengine
