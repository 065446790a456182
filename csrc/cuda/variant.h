// How the kernels reach memory where two ways are open and no GPU has said which is faster: CMake's
// PYENGINE_CUDA_VARIANT. Results have the same bits either way.
#pragma once

#ifndef PYENGINE_CUDA_VARIANT
#define PYENGINE_CUDA_VARIANT narrow
#endif

namespace pyengine {

// Where types of two and four bytes meet, a thread takes so many neighbours at a time that the narrow type fills an
// access of sixteen bytes, and the wide one two of them, each every other sixteen bytes of what a warp touches; or that
// the wide type fills one, and the narrow one an access of eight.
enum class CudaVariant { narrow, wide };

inline constexpr CudaVariant kCudaVariant = CudaVariant::PYENGINE_CUDA_VARIANT;
inline constexpr const char* kCudaVariantName = kCudaVariant == CudaVariant::wide ? "wide" : "narrow";

}  // namespace pyengine
