// kernels: which there are, and that they are loaded.
#include "kernels.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace pyengine {
namespace {

// Complete when the library is loaded; nobody writes to it afterwards.
std::vector<const void*>& kernels() {
  static std::vector<const void*> all;
  return all;
}

}  // namespace

bool know_kernel(const void* kernel) {
  kernels().push_back(kernel);
  return true;
}

// ---- entry points ----

int64_t load_kernels_cuda() {
  for (const void* kernel : kernels()) {
    cudaFuncAttributes attributes;  // nobody wants them, but CUDA loads what it is asked about
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess) continue;
    cudaGetLastError();  // reported here, so the next call must not find it again
    throw std::runtime_error(std::string("loading of the CUDA kernels failed: ") + cudaGetErrorString(error));
  }
  return static_cast<int64_t>(kernels().size());
}

}  // namespace pyengine
