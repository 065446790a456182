// Shared by AVX2 and AVX-512: in both, sixteen 16-bit values are one __m256i.
#pragma once
#include <immintrin.h>

namespace pyengine::PYENGINE_ISA {
namespace {

// Sixteen values in their storage type; each instruction set defines how floats are held.
template <class T> struct Packed { __m256i bits; };

template <class T> Packed<T> load_packed(const T* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
template <class T> void store_packed(T* p, Packed<T> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.bits);
}
template <class T> void stream_packed(T* p, Packed<T> v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v.bits);
}
inline void stream_fence() { _mm_sfence(); }
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline int exponent_of(bf16 magnitude) { return magnitude.bits >> 7; }
inline int exponent_of(fp16 magnitude) {
  return _mm_cvtsi128_si32(_mm_castps_si128(_mm_cvtph_ps(_mm_cvtsi32_si128(magnitude.bits)))) >> 23;
}

// The largest magnitude seen among 16-bit values, which are not widened.
template <class T>
class Largest {
 public:
  void see(Packed<T> v) {
    largest_ = _mm256_max_epi16(largest_, _mm256_and_si256(v.bits, _mm256_set1_epi16(0x7fff)));
  }
  bool is_finite() const {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(largest_, _mm256_set1_epi16(kInfinity<T> - 1))) == 0;
  }
  int exponent() const {
    const __m128i most = _mm_max_epi16(_mm256_castsi256_si128(largest_), _mm256_extracti128_si256(largest_, 1));
    // The only instruction that reduces across eight lanes finds the minimum, so pass it the complement.
    const __m128i all = _mm_set1_epi16(-1), least = _mm_minpos_epu16(_mm_xor_si128(most, all));
    return exponent_of(T{static_cast<uint16_t>(~_mm_cvtsi128_si32(least))});
  }

 private:
  __m256i largest_ = _mm256_setzero_si256();
};

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
