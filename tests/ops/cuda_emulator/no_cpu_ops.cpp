// The emulated module runs the CUDA kernels alone, so it links without the CPU ops that python.cpp binds too.
#include <stdexcept>

#include "../../../csrc/cpu/dispatch.h"

namespace pyengine {

const Ops& ops() { throw std::logic_error("the emulated module has no CPU ops"); }
bool set_isa(const char*) { return false; }

}  // namespace pyengine
