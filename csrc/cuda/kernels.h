// The list of all kernels, so that all can be loaded before a CUDA graph captures one.
#pragma once

namespace pyengine {

// Registers a kernel once; launch.cuh calls it for every kernel it launches, while the library is loaded. Always
// returns true.
bool know_kernel(const void* kernel);

}  // namespace pyengine
