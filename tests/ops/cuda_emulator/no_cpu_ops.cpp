// The emulated module runs the CUDA kernels alone, so it links without the CPU ops that python.cpp binds too.
#include <stdexcept>

#include "../../../csrc/cpu/dispatch.h"

namespace pyengine {

bool has_ops() { return true; }  // or the module would not load
const Ops& ops() { throw std::logic_error("the emulated module has no CPU ops"); }
bool set_isa(const char*) { return false; }

}  // namespace pyengine
