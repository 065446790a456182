// The functions of torch that the core calls at run time, looked up by name in the libtorch that Python has loaded:
// torch's thread pool and the facts of a tensor. The core includes no torch header and links no torch library.
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

// Facts of a tensor as Python reports them, to find their offsets in the Python object, the TensorImpl and the
// StorageImpl.
struct Probe {
  const void *tensor, *storage;  // Tensor._cdata, UntypedStorage._cdata
  uint64_t keys;                 // dispatch keys
  int64_t storage_offset;        // elements
  const void* data;              // of the storage
  int64_t bytes;                 // of the storage
};

// Returns false if a fact is not found, or a shim function is missing. `plain_keys` are the dispatch keys of tensors
// whose elements are stored at their address.
bool learn_tensor_object(const void* object, const Probe& probe, uint64_t plain_keys);

// Returns false unless the object is a dense contiguous CPU or CUDA tensor whose storage holds all of its elements
// (neither lazily negated nor fake). Always false before learn_tensor_object.
bool tensor_facts(const void* object, TensorFacts* facts);

// Whether a tensor still begins at `data`, in a storage with at least `numel` elements of `size` bytes from there on.
// The storage may have been freed and allocated again, smaller, at the same address. True before learn_tensor_object.
bool is_at(const void* object, const void* data, int64_t numel, int64_t size);

}  // namespace pyengine
