// Encodes and decodes four neighboring values at once, with the same bits as codec.h (except for the bits of
// a NaN) and fewer instructions. The codec's kernels are limited by integer instructions, not by
// floating-point instructions or memory.
#pragma once
#include "../codec.h"
#include "packed.cuh"

namespace pyengine {
namespace {

// Number of values that one thread handles at a time: 16 bytes of float32, or 4 bytes of one-byte codes.
constexpr int kEach = 4;

// Four codes in one or two words. A payload of one-byte codes is padded to whole words; two-byte codes may
// begin anywhere.
template <class Code>
struct Quad {
  unsigned words[sizeof(Code)];

  __device__ __forceinline__ unsigned code(int i) const {
    if constexpr (sizeof(Code) == 1) return words[0] >> (8 * i) & 0xffu;
    else return words[i / 2] >> (i % 2 * 16) & 0xffffu;
  }
  // Must be called once for each code, on a zeroed Quad.
  __device__ __forceinline__ void set(int i, unsigned code) {
    if constexpr (sizeof(Code) == 1) words[0] |= code << (8 * i);
    else words[i / 2] |= code << (i % 2 * 16);
  }
};

// Gathers byte `kByte` of each of four words in one word.
template <int kByte>
__device__ __forceinline__ unsigned gather_bytes(const unsigned* words) {
  constexpr unsigned kTwo = (4 + kByte) << 4 | kByte;
  return __byte_perm(__byte_perm(words[0], words[1], kTwo), __byte_perm(words[2], words[3], kTwo), 0x5410);
}

// ---- hardware conversions ----

// sm_89 and newer have instructions that convert to eight-bit floats (rounding to nearest even and saturating
// at the largest finite value), and instructions that widen eight-bit floats.
template <class Format>
__device__ __forceinline__ unsigned pair_of(float low, float high);
template <class Format>
__device__ __forceinline__ unsigned halves_of(unsigned pair);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <class Format>
constexpr bool kConverts = __is_same(Format, E4m3) || __is_same(Format, E5m2);

template <>
__device__ __forceinline__ unsigned pair_of<E4m3>(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ unsigned pair_of<E5m2>(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ unsigned halves_of<E4m3>(unsigned pair) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
  return halves;
}
template <>
__device__ __forceinline__ unsigned halves_of<E5m2>(unsigned pair) {
  unsigned halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
  return halves;
}
#else
template <class Format>
constexpr bool kConverts = false;
#endif

// ---- scales ----

// scale_of without the special cases of a division. A correction by the remainder correctly rounds the
// quotient of a normal number and a constant, and quotients below the smallest scale are clamped.
template <class Format>
__device__ __forceinline__ float quick_scale_of(uint32_t largest) {
  constexpr float kInverse = 1 / Format::kLargest;
  const float x = as_float(largest), rough = x * kInverse;
  const float quotient = fmaf(fmaf(-Format::kLargest, rough, x), kInverse, rough);
  const float scale = fminf(fmaxf(quotient, kMinScale), Format::kMaxScale);
  return largest == 0 ? 0 : scale;
}

// inverse_of for a scale: neither the scale nor its reciprocal is denormal.
__device__ __forceinline__ float quick_inverse_of(float scale) {
#ifdef __CUDA_ARCH__
  float rough;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(scale));
  const float inverse = fmaf(rough, -fmaf(rough, scale, -1.0f), rough);
  return scale > 0 ? inverse : 0;
#else
  return inverse_of(scale);
#endif
}

// ---- formats ----
//
// Four<Format>::encode<stochastic>(x, y, chance, element) returns the codes of finite values x, given y = x ·
// (1/s); `element` is the index of the first value, for the hash. decode(codes) returns the decoded values in
// units of s.

template <class Format>
struct Four {
  using Codes = Quad<typename Format::Code>;

  template <bool kStochastic>
  __device__ __forceinline__ static Codes encode(const Floats<kEach>& x, const Floats<kEach>& y, const Chance& chance,
                                                 uint32_t element) {
    Codes codes{};
    if constexpr (kConverts<Format> && !kStochastic) {
      codes.words[0] = pair_of<Format>(y.lane[0], y.lane[1]) | pair_of<Format>(y.lane[2], y.lane[3]) << 16;
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint32_t random = kStochastic ? hashed(chance, element + i) : 0;
        codes.set(i, Format::template code<kStochastic>(as_bits(x.lane[i]), as_bits(y.lane[i]), random));
      }
    }
    return codes;
  }

  __device__ __forceinline__ static Floats<kEach> decode(const Codes& codes) {
    Floats<kEach> values;
    if constexpr (kConverts<Format>) {
#pragma unroll
      for (int i = 0; i < kEach; i += 2) {
        const unsigned halves = halves_of<Format>(codes.words[0] >> (8 * i));
        values.lane[i] = float_of<fp16>(halves & 0xffffu), values.lane[i + 1] = float_of<fp16>(halves >> 16);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) values.lane[i] = as_float(Format::meaning(codes.code(i)));
    }
    return values;
  }

  // Records codes of NaN that decode does not handle; here, decode handles all codes.
  struct Nans {
    __device__ __forceinline__ void see(const Codes&) {}
    __device__ __forceinline__ bool some() const { return false; }
  };
  __device__ __forceinline__ static void put_nans(const Codes&, Floats<kEach>&) {}
};

template <>
struct Four<Int8> {
  using Codes = Quad<uint8_t>;

  template <bool kStochastic>
  __device__ __forceinline__ static Codes encode(const Floats<kEach>&, const Floats<kEach>& y, const Chance& chance,
                                                 uint32_t element) {
    unsigned words[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (kStochastic) {
        // In units of 2^-24: y + r rounded down, where r is a random number below 1. For a negative y, the
        // result is y - r rounded up, which equals y + (1 - r - 2^-24) rounded down, so the random bits are
        // flipped.
        const float clamped = fminf(fmaxf(y.lane[i], -Int8::kLargest), Int8::kLargest);
        const unsigned flip = static_cast<unsigned>(static_cast<int>(as_bits(y.lane[i])) >> 31);
        const unsigned random = hashed(chance, element + i) ^ flip;
        words[i] = static_cast<unsigned>(static_cast<int>(clamped * 0x1p24f)) + (random >> 8);
      } else {
        // A float between 2^23 and 2^24 has no fraction, so the sum is rounded to nearest even, and its last
        // byte is the code of y. y exceeds 127 by too little to be rounded to 128.
        words[i] = as_bits(y.lane[i] + 0x1.8p23f);
      }
    }
    return {gather_bytes<kStochastic ? 3 : 0>(words)};
  }

  // The code of NaN decodes to -128 (see put_nans).
  __device__ __forceinline__ static Floats<kEach> decode(const Codes& codes) {
    const unsigned from_zero = codes.words[0] ^ 0x80808080u;
    Floats<kEach> values;
#pragma unroll
    for (int i = 0; i < kEach; ++i)  // 2^23 + 128 + code, minus (2^23 + 128)
      values.lane[i] = as_float(__byte_perm(from_zero, 0x4b000000u, 0x7440u + i)) - 0x1.0001p23f;
    return values;
  }

  class Nans {
   public:
    __device__ __forceinline__ void see(const Codes& codes) {
      // Sets the top bit of the lowest byte that is the code of NaN, and possibly of higher bytes. Without a
      // NaN, sets no top bit.
      const unsigned from_nan = codes.words[0] ^ 0x80808080u;
      found_ |= (from_nan - 0x01010101u) & ~from_nan;
    }
    __device__ __forceinline__ bool some() const { return (found_ & 0x80808080u) != 0; }

   private:
    unsigned found_ = 0;
  };

  // Replaces the values whose code is NaN.
  __device__ __forceinline__ static void put_nans(const Codes& codes, Floats<kEach>& values) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (codes.code(i) == 0x80) values.lane[i] = as_float(kQuietNan);
  }
};

}  // namespace
}  // namespace pyengine
