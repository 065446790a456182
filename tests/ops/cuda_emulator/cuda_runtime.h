// A stand-in for CUDA's header: the little that csrc/cuda uses of it, running on a CPU so that kernels are tested
// where there is no GPU. Blocks run one after the other; the threads of a block are fibers that switch at barriers
// and shuffles (emulator.cpp). A fault that the hardware would punish (threads at different barriers, a misaligned
// vector, an address that is not there, a kernel that was not loaded before) comes out of the launch as std::runtime_error.
//
// It cannot show what needs two blocks at the same time: a missing __threadfence, a race between blocks.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// All thread-local storage of a module is one piece of memory, which the emulator can poison before every block.
#define __shared__ static thread_local

// ---- types ----

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulator {
void check_aligned(const void* address, size_t bytes);
}

struct alignas(16) uint4 {
  unsigned x, y, z, w;

  uint4() = default;
  uint4(unsigned x, unsigned y, unsigned z, unsigned w) : x(x), y(y), z(z), w(w) {}
  uint4(const uint4& other) { *this = other; }
  uint4& operator=(const uint4& other) {
    emulator::check_aligned(this, sizeof(uint4));
    emulator::check_aligned(&other, sizeof(uint4));
    std::memcpy(static_cast<void*>(this), &other, sizeof(uint4));
    return *this;
  }
};

struct alignas(8) uint2 {
  unsigned x, y;

  uint2() = default;
  uint2(unsigned x, unsigned y) : x(x), y(y) {}
  uint2(const uint2& other) { *this = other; }
  uint2& operator=(const uint2& other) {
    emulator::check_aligned(this, sizeof(uint2));
    emulator::check_aligned(&other, sizeof(uint2));
    std::memcpy(static_cast<void*>(this), &other, sizeof(uint2));
    return *this;
  }
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
struct CUstream_st;
using cudaStream_t = CUstream_st*;

struct cudaFuncAttributes {
  int numRegs;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

// ---- in a kernel ----

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

// A line of a kernel: threads that wait together must wait at the same one.
struct Site {
  const char* file;
  int line;
};

int wait_for_block(int predicate, Site site);
uint64_t wait_for_warp(unsigned mask, uint64_t value, unsigned delta, bool is_xor, Site site);

}  // namespace emulator

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::wait_for_block(0, {file, line});
}
inline int __syncthreads_or(int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulator::wait_for_block(predicate, {file, line});
}

namespace emulator {

template <class T>
T shuffle(unsigned mask, T value, unsigned delta, bool is_xor, Site site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = wait_for_warp(mask, bits, delta, is_xor, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
  return emulator::shuffle(mask, value, delta, false, {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned delta, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  return emulator::shuffle(mask, value, delta, true, {file, line});
}

inline void __syncwarp(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::wait_for_warp(0xffffffffu, 0, 0, true, {file, line});
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, const char* file = __builtin_FILE(),
                                  int line = __builtin_LINE()) {
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    const unsigned other = emulator::shuffle(mask, value, distance, true, {file, line});
    value = other > value ? other : value;
  }
  return value;
}
inline int __any_sync(unsigned mask, int predicate, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return __reduce_max_sync(mask, predicate != 0, file, line) != 0;
}

inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address += value;
  return before;
}

template <class T>
T __ldcs(const T* address) { return *address; }
template <class T>
void __stcs(T* address, T value) { *address = value; }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned found = 0;
  for (unsigned i = 0; i < 4; ++i) found |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return found;
}
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }

// ---- on the host ----

namespace emulator {
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& thread);
}

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), const Args&... args) {
  const std::tuple<Params...> params(args...);
  return emulator::launch(*config, reinterpret_cast<const void*>(kernel), [&] { std::apply(kernel, params); });
}

// Asked about a kernel, CUDA loads it. Here a launch is refused without, as it may be while a graph is captured.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
