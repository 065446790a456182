// A stand-in for CUDA's header, see cuda_runtime.h. Rounds to nearest even; NaN becomes 0x7fff, as on a GPU.
#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (x != x) return {0x7fff};
  const unsigned bits = __float_as_uint(x), odd = bits >> 16 & 1;
  return {static_cast<unsigned short>((bits + 0x7fff + odd) >> 16)};
}

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
