// Which kernels there are, so that all of them can be loaded before a CUDA graph captures one.
#pragma once

namespace pyengine {

// Notes a kernel, once each; launch.cuh calls it for whatever it launches, while the library is loaded. Always true.
bool know_kernel(const void* kernel);

}  // namespace pyengine
