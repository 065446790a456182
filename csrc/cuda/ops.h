// The ops on CUDA. All addresses are in device memory, except Tensors::data; `layout` comes from layout_at().
// Each op is one launch on `stream` (a cudaStream_t) and does not wait for it; callers copy long lists of
// addresses to the device beforehand, with upload_cuda. A failed launch throws std::runtime_error.
#pragma once
#include "../calls.h"
#include "../plan.h"

namespace pyengine {

// Numbers of addresses that fit in a kernel's parameters, which are limited to 32764 bytes. Kernels are
// compiled for both sizes and launched with the smallest size that fits, because a launch copies all
// parameters. A third size of 1000 would increase compile times by half. Longer lists need
// Tensors::on_device. So do lists longer than kInlineSlots in an op that reads one list and writes a
// different list.
inline constexpr int64_t kInlineSlots = 256, kMostInlineSlots = 4000;

#define PYENGINE_OP(op, Call) void op##_cuda(const DeviceLayout& layout, void* stream, const Call& call);
PYENGINE_OPS(PYENGINE_OP)
#undef PYENGINE_OP

// Writes n addresses from host memory to device memory with kernels that take the addresses as parameters.
// The copy is in stream order and needs no host buffer that outlives the call, so a CUDA graph can capture
// it.
void upload_cuda(void** on_device, void* const* data, int64_t n, void* stream);

// Registers a kernel. launch.cuh calls this once for every kernel that it launches, while the library is
// being loaded. Always returns true.
bool know_kernel(const void* kernel);

// Loads every registered kernel on the current device and returns their number. CUDA loads a kernel at its
// first launch, which a CUDA graph must not capture.
int64_t load_kernels_cuda();

}  // namespace pyengine
