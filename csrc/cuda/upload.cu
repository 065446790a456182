// Copies long lists of addresses to device memory through the parameters of small kernels.
#include "launch.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

constexpr int kThreads = 256;

template <class Table>
__global__ void __launch_bounds__(kThreads)
upload_kernel(void** on_device, const __grid_constant__ Table part, int n) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i < n) on_device[i] = part.at(i);
}

}  // namespace

// ---- entry points ----

void upload_cuda(void** on_device, void* const* data, int64_t n, void* stream) {
  for (int64_t first = 0; first < n; first += kMostInlineSlots) {
    const int count = static_cast<int>(n - first < kMostInlineSlots ? n - first : kMostInlineSlots);
    with_table({data + first, DType::f32}, count, [&](const auto& part) {
      launch<upload_kernel<Bare<decltype(part)>>>("upload", (count + kThreads - 1) / kThreads, kThreads, stream,
                                                          on_device + first, part, count);
    });
  }
}

}  // namespace pyengine
