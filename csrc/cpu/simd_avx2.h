// simd.h for AVX2 + FMA + F16C.
#pragma once
#include "simd_x86.h"

namespace pyengine::PYENGINE_ISA {
namespace {

struct F32x16 { __m256 lo, hi; };
struct F64x16 { __m256d quarter[4]; };

template <> struct Packed<float> { F32x16 x; };

inline F32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }

inline Packed<float> load_packed(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline void store_packed(float* p, Packed<float> v) {
  _mm256_storeu_ps(p, v.x.lo);
  _mm256_storeu_ps(p + 8, v.x.hi);
}
inline void stream_packed(float* p, Packed<float> v) {
  _mm256_stream_ps(p, v.x.lo);
  _mm256_stream_ps(p + 8, v.x.hi);
}

inline F32x16 widen(Packed<float> v) { return v.x; }
inline __m256 widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline F32x16 widen(Packed<bf16> v) {
  return {widen_bf16(_mm256_castsi256_si128(v.bits)), widen_bf16(_mm256_extracti128_si256(v.bits, 1))};
}
inline F32x16 widen(Packed<fp16> v) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(v.bits)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(v.bits, 1))};
}

// Round to nearest even by carry; the result is in the low half of each lane. NaN becomes 0x7fc0, because the
// carry could turn it into an infinity.
inline __m256i round_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), nan), 16);
}

template <class T> Packed<T> pack(F32x16 x);
template <> inline Packed<float> pack<float>(F32x16 x) { return {x}; }
template <> inline Packed<bf16> pack<bf16>(F32x16 x) {
  // packus works within 128-bit halves, so put the quarters back in order.
  return {_mm256_permute4x64_epi64(_mm256_packus_epi32(round_bf16(x.lo), round_bf16(x.hi)), 0xD8)};
}
template <> inline Packed<fp16> pack<fp16>(F32x16 x) {
  return {_mm256_set_m128i(_mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT),
                           _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT))};
}

template <>
class Largest<float> {
 public:
  void see(Packed<float> v) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    lo_ = _mm256_max_epi32(lo_, _mm256_and_si256(_mm256_castps_si256(v.x.lo), magnitude));
    hi_ = _mm256_max_epi32(hi_, _mm256_and_si256(_mm256_castps_si256(v.x.hi), magnitude));
  }
  bool is_finite() const {
    const __m256i largest = _mm256_max_epi32(lo_, hi_);
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(largest, _mm256_set1_epi32(kInfinity<float> - 1))) == 0;
  }
  int exponent() const {
    const __m256i all = _mm256_max_epi32(lo_, hi_);
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return _mm_cvtsi128_si32(most) >> 23;
  }

 private:
  __m256i lo_ = _mm256_setzero_si256(), hi_ = _mm256_setzero_si256();
};

inline F64x16 zero_sums() {
  const __m256d zero = _mm256_setzero_pd();
  return {{zero, zero, zero, zero}};
}
inline F64x16 add(F64x16 a, F64x16 b) {
  for (int q = 0; q < 4; ++q) a.quarter[q] = _mm256_add_pd(a.quarter[q], b.quarter[q]);
  return a;
}
// The square of a float is exact in double, so fma and mul + add give the same bits.
inline void add_square(__m256d& sum, __m128 x) {
  const __m256d wide = _mm256_cvtps_pd(x);
  sum = _mm256_fmadd_pd(wide, wide, sum);
}
inline void add_squares(F64x16& sums, F32x16 x) {
  add_square(sums.quarter[0], _mm256_castps256_ps128(x.lo));
  add_square(sums.quarter[1], _mm256_extractf128_ps(x.lo, 1));
  add_square(sums.quarter[2], _mm256_castps256_ps128(x.hi));
  add_square(sums.quarter[3], _mm256_extractf128_ps(x.hi, 1));
}

// The same for sixteen values in memory. Converting at the load saves the shuffles, which are half of the
// work.
inline __m128 load_quad(const float* p) { return _mm_loadu_ps(p); }
inline __m128 load_quad(const bf16* p) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16));
}
inline __m128 load_quad(const fp16* p) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
template <class T> void add_squares_at(F64x16& sums, const T* p) {
  for (int q = 0; q < 4; ++q) add_square(sums.quarter[q], load_quad(p + 4 * q));
}
inline void store_lanes(double* lane, const F64x16& sums) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(lane + 4 * i, sums.quarter[i]);
}

// ---- integers, for exact.cpp ----

struct I32x16 { __m256i lo, hi; };

inline __m256i* eight(int32_t* p) { return reinterpret_cast<__m256i*>(p); }
inline const __m256i* eight(const int32_t* p) { return reinterpret_cast<const __m256i*>(p); }

inline I32x16 load_ints(const int32_t* p) { return {_mm256_loadu_si256(eight(p)), _mm256_loadu_si256(eight(p + 8))}; }
inline void store_ints(int32_t* p, I32x16 v) {
  _mm256_storeu_si256(eight(p), v.lo);
  _mm256_storeu_si256(eight(p + 8), v.hi);
}
inline void stream_ints(int32_t* p, I32x16 v) {
  _mm256_stream_si256(eight(p), v.lo);
  _mm256_stream_si256(eight(p + 8), v.hi);
}
inline I32x16 zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32x16 add(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32x16 round_even(F32x16 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
inline F32x16 to_floats(I32x16 v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }

// AVX2 cannot convert int64, and a double has 53 bits while sums have up to 62. So for large sums, the last
// ten bits of lo become one sticky bit: rounding to 26 bits or fewer depends only on whether any of them is
// set.
inline __m256i shorten(__m256i hi, __m256i lo, int width) {
  const __m256i large = _mm256_cmpgt_epi32(_mm256_abs_epi32(hi), _mm256_set1_epi32(1 << (45 - width)));
  const __m256i last = _mm256_set1_epi32(1023);
  const __m256i none = _mm256_cmpeq_epi32(_mm256_and_si256(lo, last), _mm256_setzero_si256());
  const __m256i sticky = _mm256_andnot_si256(none, _mm256_set1_epi32(512));
  return _mm256_blendv_epi8(lo, _mm256_or_si256(_mm256_andnot_si256(last, lo), sticky), large);
}

template <Rounding rounding>
inline __m128 round_four(__m128i hi, __m128i lo, __m256d high_unit) {
  __m256d sum = _mm256_add_pd(_mm256_mul_pd(_mm256_cvtepi32_pd(hi), high_unit), _mm256_cvtepi32_pd(lo));
  if constexpr (rounding == Rounding::odd) {
    // Clear the 29 bits that a float lacks, and make the result odd if any of them was set. This gives the
    // same neighbor as to_float.
    const __m256i bits = _mm256_castpd_si256(sum), last = _mm256_set1_epi64x((1 << 29) - 1);
    const __m256i none = _mm256_cmpeq_epi64(_mm256_and_si256(bits, last), _mm256_setzero_si256());
    const __m256i odd = _mm256_andnot_si256(none, _mm256_set1_epi64x(1 << 29));
    sum = _mm256_castsi256_pd(_mm256_or_si256(_mm256_andnot_si256(last, bits), odd));
  }
  return _mm256_cvtpd_ps(sum);
}

template <Rounding rounding>
inline __m256 round_eight(__m256i hi, __m256i lo, int width) {
  const __m256d high_unit = _mm256_set1_pd(static_cast<double>(power_of_two(width)));
  lo = shorten(hi, lo, width);
  return _mm256_set_m128(
      round_four<rounding>(_mm256_extracti128_si256(hi, 1), _mm256_extracti128_si256(lo, 1), high_unit),
      round_four<rounding>(_mm256_castsi256_si128(hi), _mm256_castsi256_si128(lo), high_unit));
}

template <Rounding rounding>
inline F32x16 round_limbs(I32x16 hi, I32x16 lo, int width) {
  return {round_eight<rounding>(hi.lo, lo.lo, width), round_eight<rounding>(hi.hi, lo.hi, width)};
}

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
