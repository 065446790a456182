// The ops on CUDA. Every address is in device memory but Tensors::data, and `layout` comes from layout_at(). Each op
// is one launch on `stream` (a cudaStream_t) and waits for nothing; a failed launch throws std::runtime_error.
#pragma once
#include "../calls.h"
#include "../plan.h"

namespace pyengine {

// Addresses that travel in a kernel's own parameters, of which there are 32764 bytes. Kernels are compiled for both
// sizes and launched in the smaller one that does, because a launch copies all of it; a third size, of 1000, would make
// compile times half as long again. Longer lists need Tensors::on_device; so do two different lists, of an op that
// reads one and writes the other, above kInlineSlots.
inline constexpr int64_t kInlineSlots = 256, kMostInlineSlots = 4000;

#define PYENGINE_OP(op, Call) void op##_cuda(const DeviceLayout& layout, void* stream, const Call& call);
PYENGINE_OPS(PYENGINE_OP)
#undef PYENGINE_OP

// Writes n host addresses to device memory, by kernels that carry them in their parameters: in stream order, with
// no host buffer that would have to outlive the call, so a CUDA graph can hold it too.
void upload_cuda(void** on_device, void* const* data, int64_t n, void* stream);

// Loads every kernel on to the current device and returns how many there are. CUDA loads a kernel when it is launched
// first, and what a CUDA graph captures must not be that launch.
int64_t load_kernels_cuda();

}  // namespace pyengine
