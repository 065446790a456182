// How the kernels reach memory where several ways are open and no GPU has said which is fastest: CMake's
// PYENGINE_CUDA_VARIANT. Results have the same bits in all of them.
#pragma once

#ifndef PYENGINE_CUDA_VARIANT
#define PYENGINE_CUDA_VARIANT narrow
#endif

namespace pyengine {

// Where types of two and four bytes meet, a thread takes so many neighbours at a time that the narrow type fills an
// access of sixteen bytes, and the wide one two of them, each every other sixteen bytes of what a warp touches; or that
// the wide type fills one, and the narrow one an access of eight.
//
// Staged is narrow, but a norm that only reads types of two bytes brings a chunk to shared memory in the order of its
// addresses first. The lanes of a sum lie so that a warp's own access touches sixteen lines, a sector of each.
enum class CudaVariant { narrow, wide, staged };

inline constexpr CudaVariant kCudaVariant = CudaVariant::PYENGINE_CUDA_VARIANT;
inline constexpr bool kIsWide = kCudaVariant == CudaVariant::wide, kIsStaged = kCudaVariant == CudaVariant::staged;
inline constexpr const char* kCudaVariantName = kIsWide ? "wide" : kIsStaged ? "staged" : "narrow";

}  // namespace pyengine
