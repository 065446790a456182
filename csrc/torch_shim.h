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
  int64_t element_size;  // bytes
  int32_t scalar_type;   // c10::ScalarType
  int32_t device_type;   // c10::DeviceType: kCpu or kCuda
  int32_t device_index;  // 0 on the CPU
};

inline constexpr int32_t kCpu = 0, kCuda = 1;

// What Python says of a tensor, to find where its object, its TensorImpl and its StorageImpl keep these.
struct Probe {
  const void *tensor, *storage;  // Tensor._cdata, UntypedStorage._cdata
  uint64_t keys;                 // dispatch keys
  int64_t storage_offset;        // elements
  const void* data;              // of the storage
  int64_t bytes;                 // of the storage
};

// False when some of it is nowhere, or a shim function is missing. `plain_keys` are the dispatch keys of tensors whose
// elements are what lies at their address.
bool learn_tensor_object(const void* object, const Probe& probe, uint64_t plain_keys);

// False unless the object is a dense contiguous CPU or CUDA tensor whose storage holds all of its elements as they are
// (neither lazily negated nor fake); always false before learn_tensor_object.
bool tensor_facts(const void* object, TensorFacts* facts);

// Whether a tensor begins at `data`, as it did once, in a storage that still holds `numel` elements of `size` bytes from
// there on: it may have been freed and made anew, smaller, in the same place. True before learn_tensor_object.
bool is_at(const void* object, const void* data, int64_t numel, int64_t size);

}  // namespace pyengine
