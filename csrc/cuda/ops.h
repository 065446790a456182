// The ops on CUDA. Every address is in device memory but Tensors::data, and `layout` comes from layout_at(). Each op
// is one launch on `stream` (a cudaStream_t) and waits for nothing; a failed launch throws std::runtime_error.
#pragma once
#include "../calls.h"
#include "../plan.h"

namespace pyengine {

// As many addresses travel in a kernel's own parameters; longer lists need Tensors::on_device.
inline constexpr int64_t kInlineSlots = 256;

#define PYENGINE_OP(op, Call) void op##_cuda(const Layout& layout, void* stream, const Call& call);
PYENGINE_OPS(PYENGINE_OP)
#undef PYENGINE_OP

// Writes n host addresses to device memory, by kernels that carry them in their parameters: in stream order, with
// no host buffer that would have to outlive the call, so a CUDA graph can hold it too.
void upload_cuda(void** on_device, void* const* data, int64_t n, void* stream);

}  // namespace pyengine
