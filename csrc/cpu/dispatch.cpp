#include "dispatch.h"

#include <atomic>
#include <cstring>

#ifdef PYENGINE_NATIVE  // the name of one instruction set
#define PYENGINE_LEVEL_OF(LEVEL, isa) LEVEL(isa)
#define PYENGINE_BUILT(LEVEL) PYENGINE_LEVEL_OF(LEVEL, PYENGINE_NATIVE)
#else
#define PYENGINE_BUILT PYENGINE_LEVELS
#endif

namespace pyengine {

#define PYENGINE_OP(op, Call) op##_cpu,
#define PYENGINE_LEVEL(isa) \
  namespace isa {           \
  constexpr Ops kOps = {#isa, PYENGINE_OPS(PYENGINE_OP) roof_read, roof_update, roof_stream_copy, checksum, \
                         sample, shared_sum}; \
  }
PYENGINE_BUILT(PYENGINE_LEVEL)
#undef PYENGINE_LEVEL
#undef PYENGINE_OP

namespace {

[[maybe_unused]] bool runs_generic() { return true; }

#ifdef PYENGINE_X86
[[maybe_unused]] bool runs_avx2() {
  __builtin_cpu_init();  // also asks the OS whether it saves the wide registers
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

struct Level {
  bool (*runs_here)();
  const Ops* ops;
};
#define PYENGINE_LEVEL(isa) {runs_##isa, &isa::kOps},
constexpr Level kLevels[] = {PYENGINE_BUILT(PYENGINE_LEVEL)};
#undef PYENGINE_LEVEL

const Ops* best() {
  for (const Level& level : kLevels)
    if (level.runs_here()) return level.ops;
  return nullptr;
}

std::atomic<const Ops*>& chosen() {
  static std::atomic<const Ops*> table{best()};
  return table;
}

}  // namespace

bool has_ops() { return best() != nullptr; }

const Ops& ops() { return *chosen().load(std::memory_order_relaxed); }

bool set_isa(const char* name) {
  if (!std::strcmp(name, "auto")) {
    chosen() = best();
    return true;
  }
  for (const Level& level : kLevels)
    if (!std::strcmp(name, level.ops->isa) && level.runs_here()) {
      chosen() = level.ops;
      return true;
    }
  return false;
}

}  // namespace pyengine
