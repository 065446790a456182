// N neighboring elements in registers: as stored (Packed) and as floats (Floats). With N = 1, an access is
// scalar. If the N elements have eight bytes in total, they take one access; otherwise they take accesses of
// 16 bytes. The conversions give the same bits as on the CPU (except for the bits of a NaN).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "../dtype.h"

namespace pyengine {
namespace {

template <class T, int N>
struct Packed {
  static constexpr int kWords = (N * static_cast<int>(sizeof(T)) + 3) / 4;
  unsigned words[kWords];

  __device__ __forceinline__ unsigned bits(int i) const {
    if constexpr (sizeof(T) == 4) return words[i];
    return words[i / 2] >> (i % 2 * 16) & 0xffffu;
  }
  // Must be called once for each element, on a zeroed Packed.
  __device__ __forceinline__ void set(int i, unsigned bits) {
    if constexpr (sizeof(T) == 4) words[i] = bits;
    else words[i / 2] |= bits << (i % 2 * 16);
  }
};

template <class T>
struct Packed<T, 0> {};  // an operand that the op does not have

template <int N>
struct Floats {
  float lane[N];
};

// ---- memory ----

// Tells the compiler that an address from a table is in global memory, so that accesses need no check. (On
// the host this does nothing.)
template <class T>
__device__ __forceinline__ T* global(T* p) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// Issues the load immediately (volatile). Otherwise the compiler sinks the load below the branch and exposes
// a second memory latency.
__device__ __forceinline__ float load_now(const float* p) { return *static_cast<const volatile float*>(global(p)); }

// Cache policy of a load: the default, or evict-first if no kernel reads the data again.
struct Keep {
  template <class W>
  __device__ __forceinline__ W operator()(const W* p) const { return *global(p); }
};
struct ReadOnce {
  template <class W>
  __device__ __forceinline__ W operator()(const W* p) const { return __ldcs(global(p)); }
};

// Does not use the read-only cache, because in-place ops write the same memory.
template <int N, class T, class Access = Keep>
__device__ __forceinline__ Packed<T, N> load_packed(const T* p, Access access = {}) {
  Packed<T, N> x;
  if constexpr (N == 1 && sizeof(T) == 4) {
    x.words[0] = access(reinterpret_cast<const unsigned*>(p));
  } else if constexpr (N == 1) {
    x.words[0] = access(reinterpret_cast<const unsigned short*>(p));
  } else if constexpr (x.kWords == 2) {
    const uint2 pair = access(reinterpret_cast<const uint2*>(p));
    x.words[0] = pair.x, x.words[1] = pair.y;
  } else {
#pragma unroll
    for (int w = 0; w < x.kWords; w += 4) {
      const uint4 quad = access(reinterpret_cast<const uint4*>(p) + w / 4);
      x.words[w] = quad.x, x.words[w + 1] = quad.y, x.words[w + 2] = quad.z, x.words[w + 3] = quad.w;
    }
  }
  return x;
}

template <class T, int N>
__device__ __forceinline__ void store_packed(T* p, const Packed<T, N>& x) {
  p = global(p);
  if constexpr (N == 1 && sizeof(T) == 4) {
    *reinterpret_cast<unsigned*>(p) = x.words[0];
  } else if constexpr (N == 1) {
    *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(x.words[0]);
  } else if constexpr (x.kWords == 2) {
    *reinterpret_cast<uint2*>(p) = uint2{x.words[0], x.words[1]};
  } else {
#pragma unroll
    for (int w = 0; w < x.kWords; w += 4)
      reinterpret_cast<uint4*>(p)[w / 4] = uint4{x.words[w], x.words[w + 1], x.words[w + 2], x.words[w + 3]};
  }
}

// Loads the first n of N elements. Missing elements read as zero.
template <int N, class T>
__device__ __forceinline__ Packed<T, N> load_some(const T* p, int n) {
  Packed<T, N> x{};
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < n) x.set(i, load_packed<1>(p + i).words[0]);
  return x;
}

template <class T, int N>
__device__ __forceinline__ void store_some(T* p, const Packed<T, N>& x, int n) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < n) store_packed(p + i, Packed<T, 1>{x.bits(i)});
}

// ---- conversions ----

template <class T>
__device__ __forceinline__ float float_of(unsigned bits) {
  if constexpr (__is_same(T, float)) return __uint_as_float(bits);
  if constexpr (__is_same(T, bf16)) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Rounds to nearest even; denormals are kept.
template <class T>
__device__ __forceinline__ unsigned bits_of(float x) {
  if constexpr (__is_same(T, float)) return __float_as_uint(x);
  if constexpr (__is_same(T, bf16)) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return __half_as_ushort(__float2half_rn(x));
}

// A pair of conversions is one instruction (F2FP); a single conversion may use a slower unit (F2F on sm_100).
template <class T>
__device__ __forceinline__ unsigned bits_of(float low, float high) {
  unsigned word;
  if constexpr (__is_same(T, bf16)) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    std::memcpy(&word, &pair, sizeof(word));
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    std::memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

template <class T, int N>
__device__ __forceinline__ Floats<N> widen(const Packed<T, N>& x) {
  Floats<N> y;
#pragma unroll
  for (int i = 0; i < N; ++i) y.lane[i] = float_of<T>(x.bits(i));
  return y;
}

template <class T, int N>
__device__ __forceinline__ Packed<T, N> narrow(const Floats<N>& x) {
  Packed<T, N> y;
#pragma unroll
  for (int w = 0; w < y.kWords; ++w) {
    if constexpr (sizeof(T) == 4 || N == 1) y.words[w] = bits_of<T>(x.lane[w]);
    else y.words[w] = bits_of<T>(x.lane[2 * w], x.lane[2 * w + 1]);
  }
  return y;
}

// ---- arithmetic ----

template <int N>
__device__ __forceinline__ Floats<N> operator*(Floats<N> x, float scale) {
#pragma unroll
  for (int i = 0; i < N; ++i) x.lane[i] *= scale;
  return x;
}

template <int N>
__device__ __forceinline__ Floats<N> operator+(Floats<N> x, const Floats<N>& y) {
#pragma unroll
  for (int i = 0; i < N; ++i) x.lane[i] += y.lane[i];
  return x;
}

// Sets a slot's flag. Racing threads all read the same values of the other bits and write the same byte.
// Because of volatile this is not a data race: PTX treats such accesses as relaxed atomics. (An atomicOr
// would access four bytes, which may extend beyond the memory of the flags.)
__device__ __forceinline__ void raise_flag(uint8_t* flag) {
  volatile uint8_t* shared = global(flag);
  *shared = *shared | 1;
}

// Keeps the bits of the largest magnitude as an integer. If it is at least the bits of infinity, a value was
// not finite.
template <class T>
class FiniteCheck {
 public:
  template <int N>
  __device__ __forceinline__ void see(const Packed<T, N>& x) {
    constexpr unsigned kMagnitude = sizeof(T) == 4 ? 0x7fffffff : 0x7fff;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const unsigned magnitude = x.bits(i) & kMagnitude;
      largest_ = magnitude > largest_ ? magnitude : largest_;
    }
  }

  __device__ __forceinline__ void raise(uint8_t* flag) const {
    if (largest_ >= static_cast<unsigned>(kInfinity<T>)) raise_flag(flag);
  }

 private:
  unsigned largest_ = 0;
};

}  // namespace
}  // namespace pyengine
