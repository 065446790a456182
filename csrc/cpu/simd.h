// Sixteen float lanes on every machine: one __m512, two __m256, or float[16].
//
// An op is written once over these types and compiled once per instruction set. PYENGINE_ISA names the set
// and its namespace, and PYENGINE_SIMD its header. Every set has the same functions, which give the same
// bits. All code is in anonymous namespaces and uses no std templates, because the linker must never merge
// the code of different sets.
//
// In every set, `Largest` keeps the bits of the largest magnitude seen, as an integer. If it is at least the
// bits of infinity, a value was not finite. exponent() is the biased exponent of that magnitude.
#pragma once
#include <cstdint>
#include <cstring>

#include "../dtype.h"
#include "../exact.h"

#include PYENGINE_SIMD

namespace pyengine::PYENGINE_ISA {
namespace {

constexpr int64_t kLanes = 16;

// Memory access of a step: sixteen elements, sixteen with streaming stores, or the n < 16 elements of a head
// or tail (whose missing lanes read as zero).
struct Full {
  template <class T>
  Packed<T> load_bits(const T* p) const { return load_packed(p); }
  template <class T>
  F32x16 load(const T* p) const { return widen(load_bits(p)); }
  template <class T>
  void store(T* p, Packed<T> v) const { store_packed(p, v); }
  void store(int32_t* p, I32x16 v) const { store_ints(p, v); }
  template <class T>
  Packed<T> trim(Packed<T> v) const { return v; }
};

// With streaming stores, the hardware prefetcher falls behind; prefetching 2 KiB ahead is a third faster
// (measured with 0.5 to 16 KiB).
constexpr int64_t kPrefetchBytes = 2048;

struct Streamed : Full {
  template <class T>
  F32x16 load(const T* p) const {
    prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes);
    return widen(load_packed(p));
  }
  template <class T>
  void store(T* p, Packed<T> v) const { stream_packed(p, v); }
  void store(int32_t* p, I32x16 v) const { stream_ints(p, v); }
};

struct Some {
  int64_t n;
  template <class T>
  Packed<T> load_bits(const T* p) const {
    alignas(64) T lanes[kLanes] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load_packed(lanes);
  }
  template <class T>
  F32x16 load(const T* p) const { return widen(load_bits(p)); }
  template <class T>
  void store(T* p, Packed<T> v) const {
    alignas(64) T lanes[kLanes];
    store_packed(lanes, v);
    std::memcpy(p, lanes, n * sizeof(T));
  }
  // Missing lanes must not change a sum or a flag, but zero times an infinite scale is NaN.
  template <class T>
  Packed<T> trim(Packed<T> v) const {
    alignas(64) T lanes[kLanes];
    store_packed(lanes, v);
    return load_bits(lanes);
  }
};

// The sum of sixteen double lanes in a fixed order: the second half is added to the first until one lane is
// left.
inline double sum_lanes(const F64x16& sums) {
  double lane[kLanes];
  store_lanes(lane, sums);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
