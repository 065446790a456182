// Kernels with known faults and results, to test the emulator itself.
#include <cuda_runtime.h>

#include <cstdio>
#include <exception>

namespace {

constexpr unsigned kThreads = 64;

// Reads its neighbour's number without waiting for it.
__global__ void race_kernel(double* seen) {
  __shared__ double numbers[kThreads];
  numbers[threadIdx.x] = threadIdx.x;
  seen[threadIdx.x] = numbers[threadIdx.x ^ 1];
}

__global__ void unwritten_kernel(double* seen) {
  __shared__ double numbers[kThreads];
  seen[threadIdx.x] = numbers[threadIdx.x];
  numbers[threadIdx.x] = 1;
}

__global__ void early_exit_kernel(double*) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}

__global__ void two_barriers_kernel(double*) {
  if (threadIdx.x < 40) __syncthreads();
  else __syncthreads();
}

__global__ void half_a_warp_kernel(double* seen) {
  if (threadIdx.x < 16) seen[threadIdx.x] = __shfl_down_sync(0xffffffffu, 1.0, 1u);
}

__global__ void misaligned_kernel(double* seen) {
  reinterpret_cast<uint4*>(seen + 1)[threadIdx.x / 16] = uint4{1, 2, 3, 4};
}

__global__ void nowhere_kernel(double* seen) {
  if (threadIdx.x == 5) *reinterpret_cast<double*>(8) = *seen;
}

// Block b appends its number.
__global__ void order_kernel(double* seen) {
  if (threadIdx.x == 0) seen[1 + static_cast<int>(seen[0]++)] = blockIdx.x;
}

__global__ void any_kernel(double* seen, unsigned who) {
  seen[threadIdx.x] = __syncthreads_or(threadIdx.x == who);
}

template <class... Params, class... Args>
int run_unloaded(char* message, unsigned blocks, void (*kernel)(Params...), Args... args) try {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  return cudaLaunchKernelEx(&config, kernel, args...);
} catch (const std::exception& error) {
  std::snprintf(message, 1000, "%s", error.what());
  return -1;
}

template <class... Params, class... Args>
int run(char* message, unsigned blocks, void (*kernel)(Params...), Args... args) {
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  return run_unloaded(message, blocks, kernel, args...);
}

__global__ void unloaded_kernel(double*) {}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int toy_race(char* message, double* seen) { return run(message, 1, race_kernel, seen); }
EXPORT int toy_unwritten(char* message, double* seen) { return run(message, 2, unwritten_kernel, seen); }
EXPORT int toy_early_exit(char* message, double* seen) { return run(message, 1, early_exit_kernel, seen); }
EXPORT int toy_two_barriers(char* message, double* seen) { return run(message, 1, two_barriers_kernel, seen); }
EXPORT int toy_half_a_warp(char* message, double* seen) { return run(message, 1, half_a_warp_kernel, seen); }
EXPORT int toy_misaligned(char* message, double* seen) { return run(message, 1, misaligned_kernel, seen); }
EXPORT int toy_nowhere(char* message, double* seen) { return run(message, 1, nowhere_kernel, seen); }
EXPORT int toy_unloaded(char* message, double* seen) { return run_unloaded(message, 1, unloaded_kernel, seen); }
EXPORT int toy_order(char* message, double* seen) { return run(message, 5, order_kernel, seen); }
EXPORT int toy_no_blocks(char* message, double* seen) { return run(message, 0, order_kernel, seen); }
EXPORT int toy_any(char* message, double* seen, unsigned who) { return run(message, 1, any_kernel, seen, who); }
