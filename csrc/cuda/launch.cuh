// From an op's call to its kernel: addresses of slots, and a checked launch.
#pragma once
#include <cuda_runtime.h>

#include <cassert>
#include <stdexcept>
#include <string>

#include "ops.h"
#include "packed.cuh"

namespace pyengine {
namespace {

// One address per slot, in the kernel's own parameters or in device memory.
struct SlotTable {
  void* const* on_device = nullptr;
  void* data[kInlineSlots];

  SlotTable() = default;
  SlotTable(const Tensors& tensors, int64_t num_slots) : on_device(tensors.on_device) {
    if (on_device || !tensors.data) return;
    assert(num_slots <= kInlineSlots);
    for (int64_t slot = 0; slot < num_slots; ++slot) data[slot] = tensors.data[slot];
  }
};

// The chunk's first element in its own tensor and in the flat buffer. Null tensors stay null.
template <class T>
__device__ __forceinline__ T* in_tensor(const SlotTable& tensors, const Chunk& chunk) {
  // Parameters are read through the constant cache only if the two addresses never meet in one generic load.
  void* data = tensors.data[static_cast<unsigned>(chunk.slot) % kInlineSlots];
  if (tensors.on_device) data = *global(tensors.on_device + chunk.slot);
  return data ? static_cast<T*>(data) + chunk.begin : nullptr;
}
template <class T>
__device__ __forceinline__ T* in_flat(T* flat, const Layout& layout, const Chunk& chunk) {
  return flat + layout.offsets[chunk.slot] + chunk.begin;
}

// One CTA a chunk: the hardware hands out the next chunk whenever a CTA ends, which balances slots of all sizes;
// persistent CTAs would fix their shares beforehand. The grid's limit of 2^31 - 1 is more chunks than memory holds.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const char* op, int64_t ctas, int threads, void* stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here, so the next call must not find it again
  throw std::runtime_error(std::string(op) + ": launch of " + std::to_string(ctas) + " x " + std::to_string(threads) +
                           " CUDA threads failed: " + cudaGetErrorString(error) +
                           " (an earlier kernel may be the cause: set CUDA_LAUNCH_BLOCKING=1)");
}

template <class T>
T* as(void* p) { return static_cast<T*>(p); }

}  // namespace
}  // namespace pyengine
