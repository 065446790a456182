// The ops on CUDA. Every address is in device memory, except Tensors::data; `layout` comes from layout_at(). Each op is
// one launch on `stream` (a cudaStream_t) and does not wait; a failed launch throws std::runtime_error.
#pragma once
#include "../calls.h"
#include "../plan.h"

namespace pyengine {

// Numbers of addresses in a kernel's parameters, of which there are 32764 bytes. Kernels are compiled for both sizes
// and launched with the smaller one that fits, because a launch copies all parameters; a third size, of 1000, would
// increase compile times by half. Longer lists need Tensors::on_device; so do, above kInlineSlots, two different lists
// of an op that reads one and writes the other.
inline constexpr int64_t kInlineSlots = 256, kMostInlineSlots = 4000;

#define PYENGINE_OP(op, Call) void op##_cuda(const DeviceLayout& layout, void* stream, const Call& call);
PYENGINE_OPS(PYENGINE_OP)
#undef PYENGINE_OP

// Writes n host addresses to device memory, by kernels with the addresses as parameters: in stream order, without a
// host buffer that would have to outlive the call, so that a CUDA graph can capture it.
void upload_cuda(void** on_device, void* const* data, int64_t n, void* stream);

// Registers a kernel once; launch.cuh calls it for every kernel that it launches, while the library is loaded. Always
// returns true.
bool know_kernel(const void* kernel);

// Loads every registered kernel on the current device and returns their number. CUDA loads a kernel at its first
// launch, which a CUDA graph must not capture.
int64_t load_kernels_cuda();

}  // namespace pyengine
