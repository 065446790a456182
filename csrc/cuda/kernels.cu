// kernels: the list of all kernels, used to load them.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace pyengine {
namespace {

// Complete once the library is loaded, and not modified afterwards.
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
    cudaFuncAttributes attributes;  // not used: the query makes CUDA load the kernel
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess) continue;
    cudaGetLastError();  // clear the error: it is reported here, not by the next call
    throw std::runtime_error(std::string("loading the CUDA kernels failed: ") + cudaGetErrorString(error));
  }
  return static_cast<int64_t>(kernels().size());
}

}  // namespace pyengine
