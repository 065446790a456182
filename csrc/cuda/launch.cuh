// Kernel launches: tables of slot addresses, and a launch with an error check.
#pragma once
#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ops.h"
#include "packed.cuh"

namespace pyengine {
namespace {

// One address per slot, in the kernel's parameters.
template <int64_t kSlots>
struct SlotTable {
  void* data[kSlots];

  SlotTable() = default;
  SlotTable(void* const* from, int64_t n) { std::memcpy(data, from, static_cast<size_t>(n) * sizeof(void*)); }

  __device__ __forceinline__ void* at(int slot) const { return data[slot]; }
};

// The smallest table is also used for lists of any length in device memory.
template <>
struct SlotTable<kInlineSlots> {
  void* const* on_device = nullptr;
  void* data[kInlineSlots];

  SlotTable() = default;
  SlotTable(const Tensors& tensors, int64_t num_slots) : on_device(tensors.on_device) {
    if (on_device) return;
    if (num_slots > kInlineSlots)
      throw std::invalid_argument(std::to_string(num_slots) + " addresses; expected at most " +
                                  std::to_string(kInlineSlots) + ", or a list in device memory");
    if (num_slots > 0) std::memcpy(data, tensors.data, static_cast<size_t>(num_slots) * sizeof(void*));
  }

  __device__ __forceinline__ void* at(int slot) const {
    // Two separate loads, because parameters are read through the constant cache only if no generic load can
    // access them.
    void* found = data[static_cast<unsigned>(slot) % kInlineSlots];
    if (on_device) found = *global(on_device + slot);
    return found;
  }
};

// Calls fn with the smallest table that fits the list.
template <class Fn>
void with_table(const Tensors& tensors, int64_t num_slots, const Fn& fn) {
  if (tensors.on_device || num_slots <= kInlineSlots || num_slots > kMostInlineSlots)
    return fn(SlotTable<kInlineSlots>(tensors, num_slots));
  fn(SlotTable<kMostInlineSlots>(tensors.data, num_slots));
}

// Pointer to an element of a slot's tensor. Null tensors stay null.
template <class T, class Table>
__device__ __forceinline__ T* in_tensor(const Table& tensors, int slot, int64_t element) {
  void* data = tensors.at(slot);
  return data ? static_cast<T*>(data) + element : nullptr;
}

// Registers each kernel that is passed to `launch`; runs when the library is loaded.
template <auto kKernel>
const bool kIsKnown = know_kernel(reinterpret_cast<const void*>(kKernel));

// One CTA per chunk: the hardware schedules the next chunk whenever a CTA ends, which balances slots of all
// sizes. Persistent CTAs would have fixed shares. The grid's limit of 2^31 - 1 exceeds the number of chunks
// that fit in memory.
template <auto kKernel, class... Args>
void launch(const char* op, int64_t ctas, int threads, void* stream, const Args&... args) {
  static_cast<void>(kIsKnown<kKernel>);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kKernel, args...);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clear the error: it is reported here, not by the next call
  throw std::runtime_error(std::string(op) + ": launch of " + std::to_string(ctas) + " x " + std::to_string(threads) +
                           " CUDA threads failed: " + cudaGetErrorString(error) +
                           " (an earlier kernel may be the cause: set CUDA_LAUNCH_BLOCKING=1)");
}

template <class T>
using Bare = std::remove_cv_t<std::remove_reference_t<T>>;

template <class T>
T* as(void* p) { return static_cast<T*>(p); }

}  // namespace
}  // namespace pyengine
