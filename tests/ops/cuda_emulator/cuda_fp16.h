// A stand-in for CUDA's header, see cuda_runtime.h. Rounds to nearest even; NaN becomes 0x7fff, as on a GPU.
#pragma once
#include <cmath>

#include "cuda_runtime.h"

struct __half {
  unsigned short bits;
};

inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 0x3ff;
  const float sign = x.bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25));
}

inline __half __float2half_rn(float x) {
  if (x != x) return {0x7fff};
  const unsigned sign = __float_as_uint(x) >> 16 & 0x8000;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520) return {static_cast<unsigned short>(sign | 0x7c00)};
  // The last place of a half is 2^(exponent - 10), and never less than 2^-24. A mantissa that rounds up to the next
  // power of two carries into the exponent by itself.
  const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
  const unsigned mantissa = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return {static_cast<unsigned short>(sign | ((static_cast<unsigned>(exponent + 14) << 10) + mantissa))};
}

struct alignas(4) __half2 {
  __half x, y;
};

inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
