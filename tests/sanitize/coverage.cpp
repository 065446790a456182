// GCC calls __sanitizer_cov_trace_pc at every edge; libFuzzer wants counters and a table of places. This makes the one
// of the other. Places are those within the module, so they are the same in every process.
//
// GCC's libasan has empty functions of the names by which Atheris hands libFuzzer its own counters, those of Python's
// code, and comes before it; loaded before both, this passes them on.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

namespace {

constexpr size_t kPlaces = 1 << 16;

uintptr_t base_of(uintptr_t place) {
  Dl_info module;
  return dladdr(reinterpret_cast<void*>(place), &module) ? reinterpret_cast<uintptr_t>(module.dli_fbase) : 0;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED uint8_t coverage_counters[kPlaces];
EXPORTED uintptr_t coverage_places[2 * kPlaces];  // address and flags

EXPORTED void __sanitizer_cov_trace_pc() {
  const uintptr_t place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  static const uintptr_t base = base_of(place);
  const size_t index = (place - base) * 0x9E3779B97F4A7C15ull >> 48;
  coverage_places[2 * index] = place;
  ++coverage_counters[index];
}

EXPORTED void (*coverage_take_counters)(uint8_t* begin, uint8_t* end) = nullptr;  // libFuzzer's, once it is loaded
EXPORTED void (*coverage_take_places)(const uintptr_t* begin, const uintptr_t* end) = nullptr;

EXPORTED void __sanitizer_cov_8bit_counters_init(uint8_t* begin, uint8_t* end) {
  if (coverage_take_counters) coverage_take_counters(begin, end);
}

EXPORTED void __sanitizer_cov_pcs_init(const uintptr_t* begin, const uintptr_t* end) {
  if (coverage_take_places) coverage_take_places(begin, end);
}
}
