// The reductions of shared-memory collectives, as passed by pyengine/comm/arena.py.
#pragma once
#include <cstdint>

namespace pyengine {

enum class SharedKind : int { sum_f32 = 0, sum_bf16 = 1, sum_fp16 = 2, sum_f64 = 3, sum_i32 = 4, max_u8 = 5 };

inline constexpr int kSharedKinds = 6;

inline constexpr int64_t shared_bytes(SharedKind kind) {
  constexpr int64_t kBytes[kSharedKinds] = {4, 2, 2, 8, 4, 1};
  return kBytes[static_cast<int>(kind)];
}

// Elements [0, n) of every source are combined in the order of the sources; the result is written to every
// target. A target may be a source.
struct SharedSum {
  SharedKind kind;
  const void* const* sources;
  int64_t num_sources;
  void* const* targets;
  int64_t num_targets;
  int64_t n;
};

}  // namespace pyengine
