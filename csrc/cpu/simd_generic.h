// Portable version of simd.h: loops over sixteen lanes that the compiler may vectorize. The conversions give
// the same bits as F16C and the AVX2 code.
#pragma once

namespace pyengine::PYENGINE_ISA {
namespace {

struct F32x16 { float lane[16]; };
struct F64x16 { double lane[16]; };

// Sixteen values in their storage type.
template <class T> struct Packed { T lane[16]; };

inline F32x16 splat(float x) {
  F32x16 y;
  for (float& lane : y.lane) lane = x;
  return y;
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  for (int i = 0; i < 16; ++i) a.lane[i] *= b.lane[i];
  return a;
}
inline F32x16 add(F32x16 a, F32x16 b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline F32x16 sub(F32x16 a, const F32x16& b) {
  for (int i = 0; i < 16; ++i) a.lane[i] -= b.lane[i];
  return a;
}

template <class T> Packed<T> load_packed(const T* p) {
  Packed<T> v;
  std::memcpy(v.lane, p, sizeof(v.lane));
  return v;
}
template <class T> void store_packed(T* p, const Packed<T>& v) { std::memcpy(p, v.lane, sizeof(v.lane)); }
template <class T> void stream_packed(T* p, const Packed<T>& v) { store_packed(p, v); }
inline void stream_fence() {}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t u) { return __builtin_bit_cast(float, u); }

inline float widen_one(float x) { return x; }
inline float widen_one(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float widen_one(fp16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 0x3ffu;
  const uint32_t tiny = bits_of(static_cast<float>(mantissa) * 0x1p-24f);
  const uint32_t special = 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);  // quiet NaN
  const uint32_t normal = ((exponent + 112) << 23) | (mantissa << 13);
  return float_of(sign | (exponent == 0 ? tiny : exponent == 31 ? special : normal));
}

inline void pack_one(float x, float& out) { out = x; }
// Round to nearest even by carry. NaN becomes 0x7fc0, because the carry could turn it into an infinity.
inline void pack_one(float x, bf16& out) {
  const uint32_t u = bits_of(x);
  const uint32_t sum = u + 0x7fffu + ((u >> 16) & 1u);
  out.bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : sum >> 16);
}
inline void pack_one(float x, fp16& out) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  // The ulp of 0.5f is 2^-24, the smallest fp16 number, so adding 0.5f rounds to a multiple of 2^-24.
  const uint32_t tiny = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t half = magnitude > 0x7f800000u    ? nan
                        : magnitude >= 0x477ff000u ? 0x7c00u  // 65520 and above round to infinity
                        : magnitude < 0x38800000u  ? tiny     // below 2^-14
                                                   : normal;
  out.bits = static_cast<uint16_t>(sign | half);
}

template <class T> F32x16 widen(const Packed<T>& v) {
  F32x16 x;
  for (int i = 0; i < 16; ++i) x.lane[i] = widen_one(v.lane[i]);
  return x;
}
template <class T> Packed<T> pack(const F32x16& x) {
  Packed<T> v;
  for (int i = 0; i < 16; ++i) pack_one(x.lane[i], v.lane[i]);
  return v;
}

inline int32_t magnitude_of(float x) { return static_cast<int32_t>(bits_of(x) & 0x7fffffffu); }
inline int32_t magnitude_of(bf16 x) { return x.bits & 0x7fff; }
inline int32_t magnitude_of(fp16 x) { return x.bits & 0x7fff; }

template <class T> int exponent_of(int32_t magnitude) {
  return magnitude_of(widen_one(T{static_cast<uint16_t>(magnitude)})) >> 23;
}
template <> inline int exponent_of<float>(int32_t magnitude) { return magnitude >> 23; }

template <class T>
class Largest {
 public:
  void see(const Packed<T>& v) {
    for (int i = 0; i < 16; ++i) {
      const int32_t magnitude = magnitude_of(v.lane[i]);
      largest_[i] = magnitude > largest_[i] ? magnitude : largest_[i];
    }
  }
  bool is_finite() const { return most() < kInfinity<T>; }
  int exponent() const { return exponent_of<T>(most()); }

 private:
  int32_t most() const {
    int32_t most = 0;
    for (int32_t magnitude : largest_) most = magnitude > most ? magnitude : most;
    return most;
  }
  int32_t largest_[16] = {};
};

inline F64x16 zero_sums() { return {}; }
inline F64x16 add(F64x16 a, const F64x16& b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline void add_squares(F64x16& sums, const F32x16& x) {
  for (int i = 0; i < 16; ++i) sums.lane[i] += static_cast<double>(x.lane[i]) * static_cast<double>(x.lane[i]);
}
template <class T> void add_squares_at(F64x16& sums, const T* p) { add_squares(sums, widen(load_packed(p))); }
inline void store_lanes(double* lane, const F64x16& sums) { std::memcpy(lane, sums.lane, sizeof(sums.lane)); }

// ---- integers, for exact.cpp ----

struct I32x16 { int32_t lane[16]; };

inline I32x16 load_ints(const int32_t* p) {
  I32x16 v;
  std::memcpy(v.lane, p, sizeof(v.lane));
  return v;
}
inline void store_ints(int32_t* p, const I32x16& v) { std::memcpy(p, v.lane, sizeof(v.lane)); }
inline void stream_ints(int32_t* p, const I32x16& v) { store_ints(p, v); }
inline I32x16 zero_ints() { return {}; }
inline I32x16 add(I32x16 a, const I32x16& b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
// A float of 2^23 or more has no fraction, so adding 2^23 rounds.
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

template <Rounding rounding>
inline F32x16 round_limbs(const I32x16& hi, const I32x16& lo, int width) {
  F32x16 x;
  for (int i = 0; i < 16; ++i) x.lane[i] = pyengine::round_limbs<rounding>(hi.lane[i], lo.lane[i], width);
  return x;
}

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
