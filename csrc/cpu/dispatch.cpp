#include "dispatch.h"

#include <atomic>
#include <cstring>

namespace pyengine {
namespace {

#define PYENGINE_TABLE(isa)                                                                   \
  {#isa, isa::pack_cpu, isa::unpack_cpu, isa::accumulate_cpu, isa::accumulate_cast_cpu,       \
   isa::unscale_norm_cpu, isa::exact_deposit_cpu, isa::exact_align_cpu, isa::exact_round_cpu, \
   isa::roof_read, isa::roof_update, isa::roof_stream_copy}

// Best first.
constexpr Ops kTables[] = {
#ifdef PYENGINE_X86
    PYENGINE_TABLE(avx512),
    PYENGINE_TABLE(avx2),
#endif
    PYENGINE_TABLE(generic),
};
#undef PYENGINE_TABLE

bool runs_here(const Ops& table) {
#ifdef PYENGINE_X86
  __builtin_cpu_init();  // also asks the OS whether it saves the wide registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (!std::strcmp(table.isa, "avx2")) return avx2;
  if (!std::strcmp(table.isa, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return !std::strcmp(table.isa, "generic");
}

const Ops* best() {
  for (const Ops& table : kTables)
    if (runs_here(table)) return &table;
  __builtin_unreachable();  // generic runs everywhere
}

std::atomic<const Ops*>& chosen() {
  static std::atomic<const Ops*> table{best()};
  return table;
}

}  // namespace

const Ops& ops() { return *chosen().load(std::memory_order_relaxed); }

bool set_isa(const char* name) {
  if (!std::strcmp(name, "auto")) {
    chosen() = best();
    return true;
  }
  for (const Ops& table : kTables)
    if (!std::strcmp(name, table.isa) && runs_here(table)) {
      chosen() = &table;
      return true;
    }
  return false;
}

}  // namespace pyengine
