// Long lists of addresses go to device memory in the parameters of small kernels.
#include "launch.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

// A kernel may have 32764 bytes of parameters.
constexpr int kUploadSlots = 4000;

struct Part {
  void* data[kUploadSlots];
};

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
upload_kernel(void** on_device, const __grid_constant__ Part part, int n) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i < n) on_device[i] = part.data[i];
}

}  // namespace

// ---- entry points ----

void upload_cuda(void** on_device, void* const* data, int64_t n, void* stream) {
  for (int64_t first = 0; first < n; first += kUploadSlots) {
    const int count = static_cast<int>(n - first < kUploadSlots ? n - first : kUploadSlots);
    Part part;
    for (int i = 0; i < count; ++i) part.data[i] = data[first + i];
    launch(upload_kernel, "upload", (count + kThreads - 1) / kThreads, kThreads, stream, on_device + first, part, count);
  }
}

}  // namespace pyengine
