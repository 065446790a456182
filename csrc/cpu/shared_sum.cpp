// One rank's share of a reduction over buffers that this process has mapped. Sources are added in order, in
// float32 for narrow types, and rounded once. Runs on one thread, because the other ranks reduce the other
// shares.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

template <class T>
void sum_floats(const SharedSum& call) {
  const T* first = static_cast<const T*>(call.sources[0]);
  sweep(first, call.n, false, [&](int64_t i, auto access) PYENGINE_INLINE {
    F32x16 sum = access.load(first + i);
    for (int64_t s = 1; s < call.num_sources; ++s) sum = add(sum, access.load(static_cast<const T*>(call.sources[s]) + i));
    for (int64_t t = 0; t < call.num_targets; ++t) access.store(static_cast<T*>(call.targets[t]) + i, pack<T>(sum));
  });
}

// A run stays in the L1 cache, and the compiler vectorizes its loops.
template <class T, class Op>
void combine(const SharedSum& call, const Op& op) {
  constexpr int64_t kRun = 8192 / sizeof(T);
  alignas(64) T run[kRun];
  for (int64_t begin = 0; begin < call.n; begin += kRun) {
    const int64_t n = call.n - begin < kRun ? call.n - begin : kRun;
    std::memcpy(run, static_cast<const T*>(call.sources[0]) + begin, n * sizeof(T));
    for (int64_t s = 1; s < call.num_sources; ++s) {
      const T* source = static_cast<const T*>(call.sources[s]) + begin;
      for (int64_t i = 0; i < n; ++i) run[i] = op(run[i], source[i]);
    }
    for (int64_t t = 0; t < call.num_targets; ++t)
      std::memcpy(static_cast<T*>(call.targets[t]) + begin, run, n * sizeof(T));
  }
}

}  // namespace

// ---- entry point ----

void shared_sum(const SharedSum& call) {
  const auto plus = [](auto a, auto b) { return a + b; };
  const auto larger = [](auto a, auto b) { return a < b ? b : a; };
  switch (call.kind) {
    case SharedKind::sum_f32: return sum_floats<float>(call);
    case SharedKind::sum_bf16: return sum_floats<bf16>(call);
    case SharedKind::sum_fp16: return sum_floats<fp16>(call);
    case SharedKind::sum_f64: return combine<double>(call, plus);
    case SharedKind::sum_i32: return combine<uint32_t>(call, plus);  // wraps
    case SharedKind::max_u8: return combine<uint8_t>(call, larger);
  }
}

}  // namespace pyengine::PYENGINE_ISA
