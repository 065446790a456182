// Sixteen int32 lanes beside the sixteen floats of simd.h: what exact.cpp needs of each instruction set.
#pragma once
#include "../exact.h"
#include "simd.h"

namespace pyengine::PYENGINE_ISA {
namespace {

#if PYENGINE_ISA_LEVEL == 2

struct I32x16 { __m512i x; };

inline I32x16 load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_ints(Full, int32_t* p, I32x16 v) { _mm512_storeu_si512(p, v.x); }
inline void store_ints(Streamed, int32_t* p, I32x16 v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v.x); }
inline I32x16 zero_ints() { return {_mm512_setzero_si512()}; }
inline I32x16 add(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.x, b.x)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline I32x16 round_even(F32x16 x) { return {_mm512_cvtps_epi32(x.x)}; }
inline F32x16 to_floats(I32x16 v) { return {_mm512_cvtepi32_ps(v.x)}; }

template <class T> class Largest;

template <>
class Largest<float> {
 public:
  void see(Packed<float> v) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(v.x.x), _mm512_set1_epi32(0x7fffffff));
    largest_ = _mm512_max_epi32(largest_, magnitude);
  }
  int exponent() const { return _mm512_reduce_max_epi32(largest_) >> 23; }

 private:
  __m512i largest_ = _mm512_setzero_si512();
};

template <Rounding rounding>
inline __m256 round_eight(__m256i hi, __m256i lo, int width) {
  const __m512i high = _mm512_sll_epi64(_mm512_cvtepi32_epi64(hi), _mm_cvtsi32_si128(width));
  const __m512i sum = _mm512_add_epi64(high, _mm512_cvtepi32_epi64(lo));
  if constexpr (rounding == Rounding::nearest) return _mm512_cvtepi64_ps(sum);
  // Cut off, then made odd where something was cut: the same neighbour as to_float's.
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

#elif PYENGINE_ISA_LEVEL == 1

struct I32x16 { __m256i lo, hi; };

inline __m256i* eight(int32_t* p) { return reinterpret_cast<__m256i*>(p); }
inline const __m256i* eight(const int32_t* p) { return reinterpret_cast<const __m256i*>(p); }

inline I32x16 load_ints(const int32_t* p) { return {_mm256_loadu_si256(eight(p)), _mm256_loadu_si256(eight(p + 8))}; }
inline void store_ints(Full, int32_t* p, I32x16 v) {
  _mm256_storeu_si256(eight(p), v.lo);
  _mm256_storeu_si256(eight(p + 8), v.hi);
}
inline void store_ints(Streamed, int32_t* p, I32x16 v) {
  _mm256_stream_si256(eight(p), v.lo);
  _mm256_stream_si256(eight(p + 8), v.hi);
}
inline I32x16 zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32x16 add(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline I32x16 round_even(F32x16 x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
inline F32x16 to_floats(I32x16 v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }

template <class T> class Largest;

template <>
class Largest<float> {
 public:
  void see(Packed<float> v) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    lo_ = _mm256_max_epi32(lo_, _mm256_and_si256(_mm256_castps_si256(v.x.lo), magnitude));
    hi_ = _mm256_max_epi32(hi_, _mm256_and_si256(_mm256_castps_si256(v.x.hi), magnitude));
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

// There is no conversion of int64 here, and a double has 53 bits where sums have up to 62. So where sums are large, the
// last ten bits of lo become one: whether any of them was set is all that a rounding to 26 bits or fewer can see.
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
    // The 29 bits that a float lacks, cut off, then odd where something was cut: the same neighbour as to_float's.
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

#else

struct I32x16 { int32_t lane[16]; };

inline I32x16 load_ints(const int32_t* p) {
  I32x16 v;
  std::memcpy(v.lane, p, sizeof(v.lane));
  return v;
}
inline void store_ints(Full, int32_t* p, const I32x16& v) { std::memcpy(p, v.lane, sizeof(v.lane)); }
inline I32x16 zero_ints() { return {}; }
inline I32x16 add(I32x16 a, const I32x16& b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline F32x16 sub(F32x16 a, const F32x16& b) {
  for (int i = 0; i < 16; ++i) a.lane[i] -= b.lane[i];
  return a;
}
// Adding 2^23 leaves no room for a fraction; from there on a float has none.
inline int32_t round_one(float x) {
  const uint32_t sign = bits_of(x) & 0x80000000u;
  const float large = float_of(sign | bits_of(0x1p23f));
  const bool whole = (bits_of(x) & 0x7fffffffu) >= bits_of(0x1p23f);
  return static_cast<int32_t>(whole ? x : (x + large) - large);
}
inline I32x16 round_even(const F32x16& x) {
  I32x16 v;
  for (int i = 0; i < 16; ++i) v.lane[i] = round_one(x.lane[i]);
  return v;
}
inline F32x16 to_floats(const I32x16& v) {
  F32x16 x;
  for (int i = 0; i < 16; ++i) x.lane[i] = static_cast<float>(v.lane[i]);
  return x;
}

template <class T>
class Largest {
 public:
  void see(const Packed<T>& v) {
    for (int i = 0; i < 16; ++i) {
      const int32_t magnitude = magnitude_of(widen_one(v.lane[i]));
      largest_[i] = magnitude > largest_[i] ? magnitude : largest_[i];
    }
  }
  int exponent() const {
    int32_t most = 0;
    for (int32_t magnitude : largest_) most = magnitude > most ? magnitude : most;
    return most >> 23;
  }

 private:
  int32_t largest_[16] = {};
};

template <Rounding rounding>
inline F32x16 round_limbs(const I32x16& hi, const I32x16& lo, int width) {
  F32x16 x;
  for (int i = 0; i < 16; ++i) x.lane[i] = pyengine::round_limbs<rounding>(hi.lane[i], lo.lane[i], width);
  return x;
}

#endif

#if PYENGINE_ISA_LEVEL >= 1

inline int exponent_of(bf16 magnitude) { return magnitude.bits >> 7; }
inline int exponent_of(fp16 magnitude) {
  return _mm_cvtsi128_si32(_mm_castps_si128(_mm_cvtph_ps(_mm_cvtsi32_si128(magnitude.bits)))) >> 23;
}

// Of 16-bit types without widening all of them.
template <class T>
class Largest {
 public:
  void see(Packed<T> v) {
    largest_ = _mm256_max_epi16(largest_, _mm256_and_si256(v.bits, _mm256_set1_epi16(0x7fff)));
  }
  int exponent() const {
    const __m128i most = _mm_max_epi16(_mm256_castsi256_si128(largest_), _mm256_extracti128_si256(largest_, 1));
    // The one instruction that looks across eight lanes finds the least; so it gets what is missing to all ones.
    const __m128i all = _mm_set1_epi16(-1), least = _mm_minpos_epu16(_mm_xor_si128(most, all));
    return exponent_of(T{static_cast<uint16_t>(~_mm_cvtsi128_si32(least))});
  }

 private:
  __m256i largest_ = _mm256_setzero_si256();
};

#endif

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
