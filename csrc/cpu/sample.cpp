// Samples a few elements of a gradient for the audit; see pyengine/audit/probe.py.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {

void sample(const SampleCall& call) {
  with_type(call.dtype, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(call.from) + call.start;
    for (int64_t begin = 0; begin < call.num; begin += kLanes) {
      const int64_t num = call.num - begin < kLanes ? call.num - begin : kLanes;
      T raw[kLanes] = {};
      for (int64_t i = 0; i < num; ++i) raw[i] = from[(begin + i) * call.stride];
      float found[kLanes];
      store_packed(found, pack<float>(mul(Full().load(raw), splat(call.weight))));
      for (int64_t i = 0; i < num; ++i) call.last[begin + i] = found[i];
      for (int64_t i = 0; call.sum && i < num; ++i) call.sum[begin + i] += found[i];
    }
  });
}

}  // namespace pyengine::PYENGINE_ISA
