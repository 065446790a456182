// Torch functions that the core calls at run time, looked up by name in the libtorch that Python has loaded:
// the thread pool and tensor metadata. The core includes no torch headers and links no torch libraries.
#pragma once
#include <cstdint>

namespace pyengine {

using RangeFn = void (*)(int64_t begin, int64_t end, void* context);

// Calls fn on disjoint ranges that cover [0, n), on torch's intra-op thread pool.
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

// Values that Python reports for a tensor, used to find their offsets in the Python object, the TensorImpl,
// and the StorageImpl.
struct Probe {
  const void *tensor, *storage;  // Tensor._cdata, UntypedStorage._cdata
  uint64_t keys;                 // dispatch keys
  int64_t storage_offset;        // elements
  const void* data;              // address of the storage
  int64_t bytes;                 // size of the storage
};

// Learns the memory layout of tensor objects. Returns false if a value is not found or a shim function is
// missing. `plain_keys` are the dispatch keys of tensors whose elements are stored at their address.
bool learn_tensor_object(const void* object, const Probe& probe, uint64_t plain_keys);

// Returns false unless the object is a dense contiguous CPU or CUDA tensor whose storage holds all of its
// elements (neither lazily negated nor fake). Always false before learn_tensor_object.
bool tensor_facts(const void* object, TensorFacts* facts);

// Whether a tensor still begins at `data`, in a storage with at least `numel` elements of `size` bytes from
// there on. The storage may have been freed and allocated again, smaller, at the same address. True before
// learn_tensor_object.
bool is_at(const void* object, const void* data, int64_t numel, int64_t size);

// Whether a tensor still has this number of elements; true before learn_tensor_object().
bool has_numel(const void* object, int64_t numel);

}  // namespace pyengine
