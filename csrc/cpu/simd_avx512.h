// simd.h for AVX-512 F, BW, DQ, VL. Compiled on every x86 build; not yet run, the development machines have AVX2.
#pragma once
#include <immintrin.h>

namespace pyengine::PYENGINE_ISA {
namespace {

struct F32x16 { __m512 x; };
struct F64x16 { __m512d lo, hi; };

// Sixteen values in their storage type.
template <class T> struct Packed { __m256i bits; };
template <> struct Packed<float> { F32x16 x; };

inline F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.x, b.x)}; }

inline Packed<float> load_packed(const float* p) { return {{_mm512_loadu_ps(p)}}; }
template <class T> Packed<T> load_packed(const T* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline void store_packed(float* p, Packed<float> v) { _mm512_storeu_ps(p, v.x.x); }
template <class T> void store_packed(T* p, Packed<T> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.bits);
}
inline void stream_packed(float* p, Packed<float> v) { _mm512_stream_ps(p, v.x.x); }
template <class T> void stream_packed(T* p, Packed<T> v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v.bits);
}
inline void stream_fence() { _mm_sfence(); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

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

// Remembers the largest magnitude seen, as an integer: from infinity's bits upwards something was not finite.
template <class T>
class FiniteCheck {
 public:
  void see(Packed<T> v) {
    largest_ = _mm256_max_epi16(largest_, _mm256_and_si256(v.bits, _mm256_set1_epi16(0x7fff)));
  }
  bool failed() const { return _mm256_cmpgt_epi16_mask(largest_, _mm256_set1_epi16(kInfinity<T> - 1)) != 0; }

 private:
  __m256i largest_ = _mm256_setzero_si256();
};

template <>
class FiniteCheck<float> {
 public:
  void see(Packed<float> v) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(v.x.x), _mm512_set1_epi32(0x7fffffff));
    largest_ = _mm512_max_epi32(largest_, magnitude);
  }
  bool failed() const {
    return _mm512_cmpgt_epi32_mask(largest_, _mm512_set1_epi32(kInfinity<float> - 1)) != 0;
  }

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

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
