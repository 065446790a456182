// The ops on CUDA. Every address is in device memory but Tensors::data, and `layout` comes from layout_at(). Each op
// is one launch on `stream` (a cudaStream_t) and waits for nothing; a failed launch throws std::runtime_error.
#pragma once
#include "../calls.h"
#include "../plan.h"

namespace pyengine {

// As many addresses travel in a kernel's own parameters; longer lists need Tensors::on_device.
inline constexpr int64_t kInlineSlots = 256;

void pack_cuda(const Layout& layout, void* stream, const Flat& flat, const Tensors& tensors, const float* scale);
void unpack_cuda(const Layout& layout, void* stream, const Tensors& tensors, const Flat& flat, const float* scale);
void accumulate_cuda(const Layout& layout, void* stream, const AccumulateCall& call);
void accumulate_cast_cuda(const Layout& layout, void* stream, const AccumulateCastCall& call);
void unscale_norm_cuda(const Layout& layout, void* stream, const UnscaleNormCall& call);
void exact_deposit_cuda(const Layout& layout, void* stream, const DepositCall& call);
void exact_align_cuda(void* stream, const AlignCall& call);
void exact_round_cuda(void* stream, const RoundCall& call);

// Writes n host addresses to device memory, by kernels that carry them in their parameters: in stream order, with
// no host buffer that would have to outlive the call, so a CUDA graph can hold it too.
void upload_cuda(void** on_device, void* const* data, int64_t n, void* stream);

}  // namespace pyengine
