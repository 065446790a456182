// simd.h for AVX-512 F, BW, DQ, VL.
#pragma once
#include "simd_x86.h"

namespace pyengine::PYENGINE_ISA {
namespace {

struct F32x16 { __m512 x; };
struct F64x16 { __m512d lo, hi; };

template <> struct Packed<float> { F32x16 x; };

inline F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.x, b.x)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.x, b.x)}; }

inline Packed<float> load_packed(const float* p) { return {{_mm512_loadu_ps(p)}}; }
inline void store_packed(float* p, Packed<float> v) { _mm512_storeu_ps(p, v.x.x); }
inline void stream_packed(float* p, Packed<float> v) { _mm512_stream_ps(p, v.x.x); }

inline F32x16 widen(Packed<float> v) { return v.x; }
inline F32x16 widen(Packed<bf16> v) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v.bits), 16))};
}
inline F32x16 widen(Packed<fp16> v) { return {_mm512_cvtph_ps(v.bits)}; }

template <class T> Packed<T> pack(F32x16 x);
template <> inline Packed<float> pack<float>(F32x16 x) { return {x}; }
// Round to nearest even by carry. NaN becomes 0x7fc0, because the carry could turn it into an infinity.
template <> inline Packed<bf16> pack<bf16>(F32x16 x) {
  const __m512i u = _mm512_castps_si512(x.x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.x, x.x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000));
  return {_mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16))};
}
template <> inline Packed<fp16> pack<fp16>(F32x16 x) {
  return {_mm512_cvtps_ph(x.x, _MM_FROUND_TO_NEAREST_INT)};
}

template <>
class Largest<float> {
 public:
  void see(Packed<float> v) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(v.x.x), _mm512_set1_epi32(0x7fffffff));
    largest_ = _mm512_max_epi32(largest_, magnitude);
  }
  bool is_finite() const {
    return _mm512_cmpgt_epi32_mask(largest_, _mm512_set1_epi32(kInfinity<float> - 1)) == 0;
  }
  int exponent() const { return _mm512_reduce_max_epi32(largest_) >> 23; }

 private:
  __m512i largest_ = _mm512_setzero_si512();
};

inline F64x16 zero_sums() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline F64x16 add(F64x16 a, F64x16 b) { return {_mm512_add_pd(a.lo, b.lo), _mm512_add_pd(a.hi, b.hi)}; }
// The square of a float is exact in double, so fma and mul + add give the same bits.
inline void add_squares(F64x16& sums, F32x16 x) {
  const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x.x));
  const __m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.x, 1));
  sums.lo = _mm512_fmadd_pd(lo, lo, sums.lo);
  sums.hi = _mm512_fmadd_pd(hi, hi, sums.hi);
}
template <class T> void add_squares_at(F64x16& sums, const T* p) { add_squares(sums, widen(load_packed(p))); }
inline void store_lanes(double* lane, const F64x16& sums) {
  _mm512_storeu_pd(lane, sums.lo);
  _mm512_storeu_pd(lane + 8, sums.hi);
}

// ---- integers, for exact.cpp ----

struct I32x16 { __m512i x; };

inline I32x16 load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_ints(int32_t* p, I32x16 v) { _mm512_storeu_si512(p, v.x); }
inline void stream_ints(int32_t* p, I32x16 v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v.x); }
inline I32x16 zero_ints() { return {_mm512_setzero_si512()}; }
inline I32x16 add(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.x, b.x)}; }
inline I32x16 round_even(F32x16 x) { return {_mm512_cvtps_epi32(x.x)}; }
inline F32x16 to_floats(I32x16 v) { return {_mm512_cvtepi32_ps(v.x)}; }

template <Rounding rounding>
inline __m256 round_eight(__m256i hi, __m256i lo, int width) {
  const __m512i high = _mm512_sll_epi64(_mm512_cvtepi32_epi64(hi), _mm_cvtsi32_si128(width));
  const __m512i sum = _mm512_add_epi64(high, _mm512_cvtepi32_epi64(lo));
  if constexpr (rounding == Rounding::nearest) return _mm512_cvtepi64_ps(sum);
  // Truncate, and make the result odd if a bit was lost. This gives the same neighbor as to_float.
  const __m256 cut = _mm512_cvt_roundepi64_ps(sum, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __mmask8 inexact = _mm512_cmpneq_epi64_mask(_mm512_cvttps_epi64(cut), sum);
  const __m256i bits = _mm256_castps_si256(cut);
  return _mm256_castsi256_ps(_mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1)));
}

template <Rounding rounding>
inline F32x16 round_limbs(I32x16 hi, I32x16 lo, int width) {
  const __m256 low = round_eight<rounding>(_mm512_castsi512_si256(hi.x), _mm512_castsi512_si256(lo.x), width);
  const __m256 high =
      round_eight<rounding>(_mm512_extracti64x4_epi64(hi.x, 1), _mm512_extracti64x4_epi64(lo.x, 1), width);
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
}

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
