// The little of torch that the core uses at run time, found by name in the libtorch that Python has loaded:
// torch's thread pool and the facts of a tensor. Nothing is included from torch or linked to it.
#pragma once
#include <cstdint>

namespace pyengine {

using RangeFn = void (*)(int64_t begin, int64_t end, void* context);

// Calls fn on disjoint ranges that cover [0, n), on torch's intra-op pool.
void parallel_for(int64_t n, RangeFn fn, void* context);

// "torch" when parallel_for runs on torch's pool, "std::thread" otherwise (torch 2.9).
const char* thread_pool();

struct TensorFacts {
  void* data;
  int64_t numel;
  int32_t scalar_type;   // c10::ScalarType
  int32_t device_type;   // c10::DeviceType: kCpu or kCuda
  int32_t device_index;  // 0 on the CPU
};

inline constexpr int32_t kCpu = 0, kCuda = 1;

// Learns where a Python tensor object keeps its at::Tensor: `cdata` is its Tensor._cdata. False when the
// layout or a shim function is missing; then tensor_facts must not be called.
bool learn_tensor_object(const void* object, const void* cdata);

// False unless the object is a dense contiguous CPU or CUDA tensor.
bool tensor_facts(const void* object, TensorFacts* facts);

}  // namespace pyengine
