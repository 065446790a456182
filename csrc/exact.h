// The rules of an exact sum, shared by CPU and CUDA.
//
// An exact sum has two integers ("limbs") per element, in units of an absolute grid. The bin of a block of 64
// elements determines its grid. The bin of a sum is the largest bin of its terms, so it does not depend on
// their order. With w bits per limb, bin b has units of 2^((b-1)w-125) for `hi` and 2^((b-2)w-125) for `lo`,
// for magnitudes below 2^(bw-126). A term is split into
//   hi = rint(x / unit of hi), lo = rint((x - hi · unit of hi) / unit of lo),
// both at most 2^(w-1) in magnitude, so 2^(31-w) terms in any order stay within 2^30. If a block's bin is one
// lower than the sum's bin, the block has hi = 0 in the sum's grid, and its own hi becomes lo. If its bin is
// two or more lower, both limbs are zero. So limbs that were summed in a lower bin shift to the same values
// as if they had been summed in the higher bin. All additions are integer additions, so the result does not
// depend on order or grouping.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace pyengine {

// Results depend on this number, because the elements of a block share one bin. In blocks of 256, small
// elements would lose digits to large neighbors.
inline constexpr int64_t kExactBlock = 64;

struct ExactSum {
  int32_t *hi, *lo;   // [kExactBlock * num_blocks]
  uint8_t* bins;      // [num_blocks]
  int64_t num_blocks;
  int width;          // bits of a limb that one term fills, 19 to 31
};

// Anonymous namespace, so that the linker never shares this code between files compiled for different
// instruction sets.
namespace {

constexpr int kEmpty = 0, kPoisoned = 255;  // bins without a grid

// A block with this biased exponent or a larger one (2^126, infinities, NaN) has no bin.
constexpr int kPoisonExponent = 253;

// The bin of a block whose largest biased exponent is `exponent`. Denormals are below half of the smallest
// unit (2^-125, in bin 2), so it does not matter whether a machine flushes denormals. Bin 1 is never used.
PYENGINE_EVERYWHERE inline int bin_of(int exponent, int width) {
  if (exponent == 0) return kEmpty;
  if (exponent >= kPoisonExponent) return kPoisoned;
  const int bin = (exponent + width - 1) / width;
  return bin < 2 ? 2 : bin;
}

PYENGINE_EVERYWHERE inline bool has_grid(int bin) { return bin != kEmpty && bin != kPoisoned; }

// 1 / (unit of hi): the product with x is exact unless it underflows, in which case both limbs are zero
// anyway.
PYENGINE_EVERYWHERE inline float inverse_of_unit(int bin, int width) { return power_of_two(125 - (bin - 1) * width); }

// The unit of lo and of hi · 2^width + lo. For a poisoned block it is NaN, which turns the block's zeros into
// NaN.
PYENGINE_EVERYWHERE inline float unit_of_sum(int bin, int width) {
  if (bin == kPoisoned) return __builtin_nanf("");
  return bin == kEmpty ? 0 : power_of_two((bin - 2) * width - 125);
}

// Conversion of an integer to float: to nearest, or, before a later rounding to fewer bits, to the neighbor
// with an odd mantissa. That neighbor is a tie of 16-bit floats only if the integer was a tie, so two
// roundings give the same result as one (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
// 2008).
enum class Rounding { nearest, odd };

template <Rounding rounding>
PYENGINE_EVERYWHERE inline float to_float(int64_t sum) {
  const float nearest = static_cast<float>(sum);
  if constexpr (rounding == Rounding::nearest) return nearest;
  const int64_t error = sum - static_cast<int64_t>(nearest);
  const uint32_t bits = __builtin_bit_cast(uint32_t, nearest);
  if (error == 0 || bits % 2 == 1) return nearest;
  return __builtin_bit_cast(float, (error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

// Rounds hi · 2^width + lo, which is at most 2^61, once to a float. Its product with unit_of_sum is exact,
// because the smallest non-zero sum is 2^-125.
template <Rounding rounding>
PYENGINE_EVERYWHERE inline float round_limbs(int32_t hi, int32_t lo, int width) {
  return to_float<rounding>(static_cast<int64_t>(hi) * (int64_t{1} << width) + lo);
}

}  // namespace
}  // namespace pyengine
