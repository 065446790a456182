// What this machine's memory allows: the yardsticks of the benchmarks. One thread.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {

float roof_read(const float* src, int64_t numel) {
  F32x16 a = splat(0), b = splat(0), c = splat(0), d = splat(0);
  const Full access;
  for (int64_t i = 0; i + 4 * kLanes <= numel; i += 4 * kLanes) {
    a = add(a, access.load(src + i));
    b = add(b, access.load(src + i + kLanes));
    c = add(c, access.load(src + i + 2 * kLanes));
    d = add(d, access.load(src + i + 3 * kLanes));
  }
  float lane[kLanes];
  store_packed(lane, pack<float>(add(add(a, b), add(c, d))));
  return lane[0];
}

void roof_update(float* dst, int64_t numel) {
  const F32x16 scale = splat(1.0f);
  sweep(dst, numel, false, [&](int64_t i, auto access) {
    access.store(dst + i, pack<float>(mul(access.load(dst + i), scale)));
  });
}

void roof_stream_copy(float* dst, const float* src, int64_t numel) {
  sweep(dst, numel, true, [&](int64_t i, auto access) {
    access.store(dst + i, pack<float>(access.load(src + i)));
  });
  stream_fence();
}

}  // namespace pyengine::PYENGINE_ISA
