// Loops that measure the memory bandwidth of one thread, the reference for benchmarks.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {

// Reads eight streams, because a single stream waits for the hardware prefetcher at every page.
float roof_read(const float* src, int64_t numel) {
  constexpr int64_t kStreams = 8, kRun = 8192;
  const Full access;
  F32x16 sums[kStreams];
  for (F32x16& sum : sums) sum = splat(0);
  for (int64_t begin = 0; begin + kStreams * kRun <= numel; begin += kStreams * kRun)
    for (int64_t i = begin; i < begin + kRun; i += kLanes)
      for (int64_t s = 0; s < kStreams; ++s) sums[s] = add(sums[s], access.load(src + i + s * kRun));
  for (F32x16& sum : sums) sums[0] = add(sums[0], sum);
  float lane[kLanes];
  store_packed(lane, pack<float>(sums[0]));
  return lane[0];
}

void roof_update(float* dst, int64_t numel) {
  const F32x16 scale = splat(-1.0f);  // with a scale of one the compiler would remove the loop
  sweep(dst, numel, false, [&](int64_t i, auto access) PYENGINE_INLINE {
    access.store(dst + i, pack<float>(mul(access.load(dst + i), scale)));
  });
}

void roof_stream_copy(float* dst, const float* src, int64_t numel) {
  sweep(dst, numel, true, [&](int64_t i, auto access) PYENGINE_INLINE {
    access.store(dst + i, pack<float>(access.load(src + i)));
  });
  stream_fence();
}

}  // namespace pyengine::PYENGINE_ISA
