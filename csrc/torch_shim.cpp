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

// Signatures: torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h, torch's stable C ABI.
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

// Bytes from a Python tensor object to its at::Tensor; 0 is unknown.
size_t tensor_offset = 0;

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

bool learn_tensor_object(const void* object, const void* cdata) {
  const Shim& s = shim();
  if (!s.get_data_ptr || !s.get_numel || !s.get_dtype || !s.get_device_type || !s.get_device_index ||
      !s.is_contiguous)
    return false;
  // THPVariable is a PyObject head and an at::Tensor, which is one pointer to the TensorImpl; older torch has
  // a flag between them. Compare against the address Python tells instead of trusting a version number.
  for (size_t offset = 2 * sizeof(void*); offset <= 4 * sizeof(void*); offset += sizeof(void*)) {
    const void* found;
    std::memcpy(&found, static_cast<const char*>(object) + offset, sizeof(found));
    if (found == cdata) {
      tensor_offset = offset;
      return true;
    }
  }
  return false;
}

bool tensor_facts(const void* object, TensorFacts* facts) {
  const Shim& s = shim();
  void* tensor = const_cast<char*>(static_cast<const char*>(object)) + tensor_offset;
  bool contiguous;
  if (s.get_device_type(tensor, &facts->device_type)) return false;
  if (facts->device_type != kCpu && facts->device_type != kCuda) return false;
  facts->device_index = 0;  // torch says -1 for the CPU
  if (facts->device_type == kCuda && s.get_device_index(tensor, &facts->device_index)) return false;
  if (s.is_contiguous(tensor, &contiguous) || !contiguous) return false;
  return !s.get_dtype(tensor, &facts->scalar_type) && !s.get_numel(tensor, &facts->numel) &&
         !s.get_data_ptr(tensor, &facts->data);
}

}  // namespace pyengine
