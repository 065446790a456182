// The rules of the codec, shared by CPU and CUDA: how a single value is encoded and decoded.
//
// Let m be the largest finite magnitude of a block and L the largest value of a code. The scale is s = m / L,
// code c decodes to c · s, and x is encoded by rounding y = x · (1/s) to a code. The division, the
// reciprocal, and both products are rounded to nearest, each with a relative error of at most 2^-24. So,
// apart from the rounding of y to a code, the error of c · s is at most
//   |y/s' - x/s| + 2^-24 |c| <= |x/s| (3 · 2^-24) in units of s,
// which is below 127 · 2^-22 < 2^-15 for int8 and 2^-21 |x| for the other formats. The rounding of y adds
// half a step of the codes (a whole step if rounding is stochastic); pyengine/ops/codec.py states both
// bounds. y exceeds L by at most 2^-22 L and is clamped to L, which the same bound covers.
//
// Scales are at least 2^-110, so that 1/s and the value of the smallest code are normal numbers (denormals
// are slow on CPUs and flushed on some devices). Scales are at most the largest s for which L · s is finite.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace pyengine {

// The values match the format codes in pyengine/ops/codec_reference.py.
enum class ValueFormat : int { int8 = 0, e4m3 = 1, e5m2 = 2, bf16 = 3, fp16 = 4 };

// The layout of a payload: the float32 scales of all blocks, the codes, and zeros up to a multiple of four
// bytes. bf16 and fp16 payloads have no scales.
struct Codec {
  ValueFormat format;
  int64_t block;  // elements that share a scale, at most kMostBlock
  int64_t numel;
  int64_t num_scales;  // number of blocks, or 0 for formats without scales

  PYENGINE_EVERYWHERE int64_t scale_bytes() const { return num_scales * static_cast<int64_t>(sizeof(float)); }
};
inline constexpr int64_t kMostBlock = 1024;

// The payloads of several ranks for the same elements, one after another.
struct Payloads {
  const uint8_t* data;
  int64_t num_ranks, stride;  // stride in bytes from one payload to the next
};

// Rounding: to nearest even, or stochastic, with a hash of the key and the element's index.
struct Chance {
  bool is_stochastic;
  uint32_t key[2];
  uint32_t offset;  // index of element 0
};

// Anonymous namespace, so that the linker never shares this code between files compiled for different
// instruction sets.
namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kFloatInfinity = 0x7f800000, kQuietNan = 0x7fc00000;
constexpr float kMinScale = 0x1p-110f;

PYENGINE_EVERYWHERE inline uint32_t as_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
PYENGINE_EVERYWHERE inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
PYENGINE_EVERYWHERE inline uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// 32 random bits per element: Wellons' mixer "lowbias32", with one half of the key mixed in before each
// multiplication.
PYENGINE_EVERYWHERE inline uint32_t hashed(const Chance& chance, uint32_t element) {
  uint32_t x = (chance.offset + element) ^ chance.key[0];
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = ((x ^ (x >> 15)) ^ chance.key[1]) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// ---- formats ----
//
// In each format, code<stochastic>(x, y, random) returns the code of the float with bits y; its sign and kind
// (finite, infinite, NaN) come from bits x. meaning(code) returns the bits of the decoded float.

struct Int8 {
  using Code = uint8_t;
  static constexpr float kLargest = 127, kMaxScale = 0x1.020406p+121f;

  template <bool kStochastic>
  PYENGINE_EVERYWHERE static uint32_t code(uint32_t x, uint32_t y, uint32_t random) {
    const float magnitude = as_float(least(y & kMagnitude, as_bits(kLargest)));
    uint32_t steps;
    if constexpr (kStochastic) {  // in units of 2^-24; 127 and the largest fraction still fit
      steps = (static_cast<uint32_t>(static_cast<int32_t>(magnitude * 0x1p24f)) + (random >> 8)) >> 24;
    } else {  // a float of 2^23 or more has no fraction
      steps = as_bits(magnitude + 0x1p23f) - as_bits(0x1p23f);
    }
    const uint32_t negative = 0u - (x >> 31);
    const uint32_t code = ((steps ^ negative) - negative) & 0xff;
    return (x & kMagnitude) < kFloatInfinity ? code : 0x80u;
  }

  PYENGINE_EVERYWHERE static uint32_t meaning(uint32_t code) {
    const int32_t steps = static_cast<int32_t>(code << 24) >> 24;
    return steps == -128 ? kQuietNan : as_bits(static_cast<float>(steps));
  }
};

// Floats with fewer bits. A float32 has kCut more mantissa bits; 2^-kShift is the smallest denormal.
template <class CodeT, int kMantissa, int kBias, uint32_t kInfinity, uint32_t kNan>
struct SmallFloat {
  using Code = CodeT;
  static constexpr int kCut = 23 - kMantissa, kShift = kBias + kMantissa - 1;
  static constexpr uint32_t kCodeSign = 1u << (8 * sizeof(Code) - 1);
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23, kHalf = 1u << (kCut - 1);
  static constexpr uint32_t kMost = kInfinity - 1;  // the code of the largest finite magnitude
  static constexpr uint32_t kMostBits = (kMost << kCut) + kRebias;
  static constexpr bool kHasScale = sizeof(Code) == 1, kHasInfinity = kInfinity != kNan;
  static constexpr float kLargest = __builtin_bit_cast(float, kMostBits);
  // kLargest is 7/4 * 2^8 for e4m3 and 7/4 * 2^15 for e5m2, hence the divisors.
  static constexpr float kMaxScale = 0x1.249248p+127f / (kBias == 7 ? 0x1p8f : 0x1p15f);
  // bfloat16 has the exponent range of float32, so denormals need no special case.
  static constexpr uint32_t kNormal = kBias == 127 ? 0 : static_cast<uint32_t>(128 - kBias) << 23;

  template <bool kStochastic>
  PYENGINE_EVERYWHERE static uint32_t code(uint32_t x, uint32_t y, uint32_t random) {
    uint32_t magnitude = y & kMagnitude;
    if constexpr (kHasScale) magnitude = least(magnitude, kMostBits);
    uint32_t code;
    if constexpr (kStochastic) code = (magnitude - kRebias + (random >> (32 - kCut))) >> kCut;
    else code = (magnitude - kRebias + (kHalf - 1) + (magnitude >> kCut & 1)) >> kCut;
    if constexpr (kNormal != 0) code = magnitude < kNormal ? tiny<kStochastic>(least(magnitude, kNormal), random) : code;
    // Stochastic rounding does not produce infinity. Values beyond the last tie become infinite, as in a
    // cast.
    code = least(code, kMost);
    if constexpr (!kHasScale) code = magnitude >= kMostBits + kHalf ? kInfinity : code;
    const uint32_t kind = x & kMagnitude, sign = x >> 31 ? kCodeSign : 0;
    if constexpr (kHasInfinity) code = kind == kFloatInfinity ? kInfinity : code;
    return kind >= kFloatInfinity + kHasInfinity ? kNan : code | sign;
  }

  PYENGINE_EVERYWHERE static uint32_t meaning(uint32_t code) {
    if constexpr (kNormal == 0) return code << kCut;
    const uint32_t sign = (code & kCodeSign) << (32 - 8 * sizeof(Code)), magnitude = code & (kCodeSign - 1);
    const float denormal = static_cast<float>(static_cast<int32_t>(magnitude)) * power_of_two(-kShift);
    uint32_t bits = magnitude < 1u << kMantissa ? as_bits(denormal) : (magnitude << kCut) + kRebias;
    if constexpr (kHasInfinity) bits = magnitude == kInfinity ? kFloatInfinity : bits;
    return (magnitude >= kInfinity + kHasInfinity ? kQuietNan : bits) | sign;
  }

 private:
  template <bool kStochastic>
  PYENGINE_EVERYWHERE static uint32_t tiny(uint32_t magnitude, uint32_t random) {
    const float x = as_float(magnitude);
    if constexpr (kStochastic)
      return (static_cast<uint32_t>(static_cast<int32_t>(x * power_of_two(kShift + kCut))) + (random >> (32 - kCut))) >> kCut;
    // Adding a power of two discards all bits below that power's ulp, so the addition itself rounds x.
    return as_bits(x + power_of_two(23 - kShift)) - as_bits(power_of_two(23 - kShift));
  }
};

using E4m3 = SmallFloat<uint8_t, 3, 7, 0x7f, 0x7f>;
using E5m2 = SmallFloat<uint8_t, 2, 15, 0x7c, 0x7f>;
using Bf16 = SmallFloat<uint16_t, 7, 127, 0x7f80, 0x7fc0>;
using Fp16 = SmallFloat<uint16_t, 10, 15, 0x7c00, 0x7e00>;

template <class Format> constexpr bool kHasScale = sizeof(typename Format::Code) == 1;

// ---- scales ----

// The magnitude that an element contributes to the maximum of its block. Nonfinite elements count as the
// smallest denormal, so they do not increase the scale, and the scale is not 0.
PYENGINE_EVERYWHERE inline uint32_t weight_of(uint32_t bits) {
  const uint32_t magnitude = bits & kMagnitude;
  return magnitude < kFloatInfinity ? magnitude : 1u;
}

template <class Format>
PYENGINE_EVERYWHERE inline float scale_of(uint32_t largest) {
  if (largest == 0) return 0;
  const float scale = as_float(largest) / Format::kLargest;
  return scale < kMinScale ? kMinScale : scale > Format::kMaxScale ? Format::kMaxScale : scale;
}

PYENGINE_EVERYWHERE inline float inverse_of(float scale) { return scale > 0 ? 1 / scale : 0; }

// The error of an encoded value: 0 if the decoded value is not finite.
PYENGINE_EVERYWHERE inline float error_of(float x, float decoded) {
  const float error = x - decoded;
  return (as_bits(decoded) & kMagnitude) < kFloatInfinity ? error : 0.0f;
}

// Calls fn(Format{}).
template <class Fn>
void with_format(ValueFormat format, const Fn& fn) {
  switch (format) {
    case ValueFormat::int8: return fn(Int8{});
    case ValueFormat::e4m3: return fn(E4m3{});
    case ValueFormat::e5m2: return fn(E5m2{});
    case ValueFormat::bf16: return fn(Bf16{});
    case ValueFormat::fp16: return fn(Fp16{});
  }
  throw std::invalid_argument("unknown value format");
}

}  // namespace

// Formats without scales also iterate in blocks of codec.block elements.
inline constexpr int64_t num_blocks_of(const Codec& codec) { return (codec.numel + codec.block - 1) / codec.block; }
inline constexpr int64_t round_up_to_four(int64_t n) { return (n + 3) / 4 * 4; }

}  // namespace pyengine
