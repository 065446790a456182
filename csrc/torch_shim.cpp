#include "torch_shim.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

namespace pyengine {
namespace {

using Status = int32_t;   // AOTITorchError: 0 is success
using Handle = void*;     // AtenTensorHandle: an at::Tensor*

// Signatures from torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h, torch's stable C
// ABI.
struct Shim {
  Status (*parallel_for)(int64_t, int64_t, int64_t, RangeFn, void*);  // torch >= 2.10
  int (*get_num_threads)();                                           // at::get_num_threads()
  Status (*get_data_ptr)(Handle, void**);
  Status (*get_numel)(Handle, int64_t*);
  Status (*get_dtype)(Handle, int32_t*);
  Status (*get_device_type)(Handle, int32_t*);
  Status (*get_device_index)(Handle, int32_t*);
  Status (*is_contiguous)(Handle, bool*);
};

template <class Fn>
void find(void* library, const char* name, Fn*& fn) {
  fn = library ? reinterpret_cast<Fn*>(dlsym(library, name)) : nullptr;
}

Shim find_shim() {
#ifdef __APPLE__
  void* library = dlopen("libtorch_cpu.dylib", RTLD_NOLOAD | RTLD_LAZY);
  if (!library) library = RTLD_DEFAULT;
#else
  void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
#endif
  Shim shim{};
  find(library, "torch_parallel_for", shim.parallel_for);
  find(library, "_ZN2at15get_num_threadsEv", shim.get_num_threads);
  find(library, "aoti_torch_get_data_ptr", shim.get_data_ptr);
  find(library, "aoti_torch_get_numel", shim.get_numel);
  find(library, "aoti_torch_get_dtype", shim.get_dtype);
  find(library, "aoti_torch_get_device_type", shim.get_device_type);
  find(library, "aoti_torch_get_device_index", shim.get_device_index);
  find(library, "aoti_torch_is_contiguous", shim.is_contiguous);
  return shim;
}

const Shim& shim() {
  static const Shim found = find_shim();
  return found;
}

// Offsets in bytes from the beginning of each object; 0 means unknown.
struct Places {
  size_t tensor;                         // in a Python tensor object: pointer to its TensorImpl
  size_t keys, storage, storage_offset;  // in a TensorImpl
  size_t data, bytes;                    // in a StorageImpl
  uint64_t not_plain;                    // dispatch keys that plain tensors do not have
} places{};

template <class T>
T load(const void* base, size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + offset, sizeof(T));
  return value;
}

const void* impl_of(const void* object) { return load<const void*>(object, places.tensor); }

// Offset of the first word in [begin, end) that holds `value`; 0 if there is none.
template <class T>
size_t offset_of(T value, const void* base, size_t begin, size_t end) {
  for (size_t offset = begin; offset < end; offset += sizeof(T))
    if (load<T>(base, offset) == value) return offset;
  return 0;
}

// Element size in bytes of the dtypes that ops accept; 0 for all others.
int64_t element_size(int32_t scalar_type) {
  switch (scalar_type) {  // c10::ScalarType, fixed by torch's serialization format
    case 0: return 1;           // uint8
    case 5: case 15: return 2;  // float16, bfloat16
    case 3: case 6: return 4;   // int32, float32
    case 7: return 8;           // float64
    default: return 0;
  }
}

// A storage may be smaller than its tensors: FSDP resizes storages to zero and keeps the tensors. A storage
// over external memory may begin at any address, and C++ cannot read an element at an address that is not a
// multiple of the element size.
bool storage_holds(const void* impl, const TensorFacts& facts) {
  const int64_t size = facts.element_size, offset = load<int64_t>(impl, places.storage_offset);
  const int64_t bytes = load<int64_t>(load<const void*>(impl, places.storage), places.bytes);
  const bool aligned = size > 0 && reinterpret_cast<uintptr_t>(facts.data) % static_cast<uintptr_t>(size) == 0;
  return size > 0 && (facts.numel == 0 || (facts.data && aligned && (offset + facts.numel) * size <= bytes));
}

void parallel_for_std_thread(int64_t n, RangeFn fn, void* context) {
  const int64_t threads = std::min<int64_t>(n, shim().get_num_threads ? shim().get_num_threads() : 1);
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i)
    others.emplace_back(fn, n * i / threads, n * (i + 1) / threads, context);
  if (n > 0) fn(0, threads > 1 ? n / threads : n, context);
  for (auto& other : others) other.join();
}

}  // namespace

void parallel_for(int64_t n, RangeFn fn, void* context) {
  if (n <= 1) {
    if (n == 1) fn(0, 1, context);
  } else if (shim().parallel_for) {
    shim().parallel_for(0, n, 1, fn, context);
  } else {
    parallel_for_std_thread(n, fn, context);
  }
}

const char* thread_pool() { return shim().parallel_for ? "torch" : "std::thread"; }

bool learn_tensor_object(const void* object, const Probe& probe, uint64_t plain_keys) {
  const Shim& s = shim();
  if (!s.get_data_ptr || !s.get_numel || !s.get_dtype || !s.get_device_type || !s.get_device_index ||
      !s.is_contiguous)
    return false;
  // THPVariable is a PyObject head and an at::Tensor; older torch versions have a flag between them. Compare
  // with the values that Python reports instead of relying on the version number. A TensorImpl has at least
  // 24 words, a StorageImpl at least 8.
  constexpr size_t kWord = sizeof(void*);
  Places found{};
  found.tensor = offset_of(probe.tensor, object, 2 * kWord, 5 * kWord);
  found.keys = offset_of(probe.keys, probe.tensor, kWord, 24 * kWord);
  found.storage = offset_of(probe.storage, probe.tensor, kWord, 24 * kWord);
  found.storage_offset = offset_of(probe.storage_offset, probe.tensor, kWord, 24 * kWord);
  found.data = offset_of(probe.data, probe.storage, kWord, 8 * kWord);
  found.bytes = offset_of(probe.bytes, probe.storage, kWord, 8 * kWord);
  found.not_plain = ~plain_keys;
  if (!found.tensor || !found.keys || !found.storage || !found.storage_offset || !found.data || !found.bytes) return false;
  places = found;
  return true;
}

bool tensor_facts(const void* object, TensorFacts* facts) {
  const Shim& s = shim();
  if (!places.tensor) return false;
  void* tensor = const_cast<char*>(static_cast<const char*>(object)) + places.tensor;
  if (load<uint64_t>(impl_of(object), places.keys) & places.not_plain) return false;
  bool contiguous;
  if (s.get_device_type(tensor, &facts->device_type)) return false;
  if (facts->device_type != kCpu && facts->device_type != kCuda) return false;
  facts->device_index = 0;  // torch reports -1 for the CPU
  if (facts->device_type == kCuda && s.get_device_index(tensor, &facts->device_index)) return false;
  if (s.is_contiguous(tensor, &contiguous) || !contiguous) return false;
  if (s.get_dtype(tensor, &facts->scalar_type) || s.get_numel(tensor, &facts->numel)) return false;
  facts->element_size = element_size(facts->scalar_type);
  return !s.get_data_ptr(tensor, &facts->data) && storage_holds(impl_of(object), *facts);
}

bool is_at(const void* object, const void* data, int64_t numel, int64_t size) {
  if (!places.tensor) return true;
  const void *impl = impl_of(object), *storage = load<const void*>(impl, places.storage);
  const char* begin = load<const char*>(storage, places.data);
  const int64_t offset = load<int64_t>(impl, places.storage_offset);
  return begin && begin + offset * size == data && (offset + numel) * size <= load<int64_t>(storage, places.bytes);
}

bool has_numel(const void* object, int64_t numel) {
  if (!places.tensor) return true;
  void* tensor = const_cast<char*>(static_cast<const char*>(object)) + places.tensor;
  int64_t found;
  return !shim().get_numel(tensor, &found) && found == numel;
}

}  // namespace pyengine
