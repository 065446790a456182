// pack and unpack: flat[slot] = cast(tensor * scale), and the reverse.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

// Writes zeros if the source is null, i.e. for a parameter without a gradient.
template <class Dst, class Src>
void scale_cast_kernel(Dst* dst, const Src* src, int64_t n, float factor, bool streaming) {
  if (!src) {
    const Packed<Dst> zero = pack<Dst>(splat(0));
    return sweep(dst, n, streaming, [&](int64_t i, auto access) PYENGINE_INLINE { access.store(dst + i, zero); });
  }
  // With a scale of one this is a copy; skipping the conversions is a third faster for 16-bit types.
  if constexpr (__is_same(Dst, Src))
    if (factor == 1)
      return sweep(dst, n, streaming, [&](int64_t i, auto access) PYENGINE_INLINE {
        access.store(dst + i, access.load_bits(src + i));
      });
  const F32x16 scale = splat(factor);
  sweep(dst, n, streaming, [&](int64_t i, auto access) PYENGINE_INLINE {
    access.store(dst + i, pack<Dst>(mul(access.load(src + i), scale)));
  });
}

// ---- dispatch ----

template <class FlatT, class TensorT>
void pack_typed(const Layout& layout, const PackCall& call) {
  FlatT* flat = as<FlatT>(call.flat.data);
  const float scale = *call.scale;
  const bool streaming = worth_streaming<FlatT>(layout);
  for_each_chunk(layout, [&](const Chunk& chunk) {
    scale_cast_kernel(in_flat(flat, layout, chunk), in_tensor<const TensorT>(call.tensors, chunk), chunk.count, scale,
                      streaming);
  });
}

template <class FlatT, class TensorT>
void unpack_typed(const Layout& layout, const PackCall& call) {
  const FlatT* flat = as<const FlatT>(call.flat.data);
  const float scale = *call.scale;
  const bool streaming = worth_streaming<TensorT>(layout);
  for_each_chunk(layout, [&](const Chunk& chunk) {
    TensorT* dst = in_tensor<TensorT>(call.tensors, chunk);
    if (dst) scale_cast_kernel(dst, in_flat(flat, layout, chunk), chunk.count, scale, streaming);
  });
}

}  // namespace

// ---- entry points ----

void pack_cpu(const Layout& layout, const PackCall& call) {
  if (call.only_if && *call.only_if == 0) return;
  with_types(call.flat.dtype, call.tensors.dtype, [&](auto flat_t, auto tensor_t) {
    pack_typed<decltype(flat_t), decltype(tensor_t)>(layout, call);
  });
}

void unpack_cpu(const Layout& layout, const PackCall& call) {
  if (call.only_if && *call.only_if == 0) return;
  with_types(call.flat.dtype, call.tensors.dtype, [&](auto flat_t, auto tensor_t) {
    unpack_typed<decltype(flat_t), decltype(tensor_t)>(layout, call);
  });
}

}  // namespace pyengine::PYENGINE_ISA
