// Stands in for libtorch_cpu.so, which no sanitizer has instrumented: how many threads ops run on, and nothing else, so
// that the core takes its own threads.
#include <atomic>

#define EXPORTED __attribute__((visibility("default")))

namespace at {
namespace {
std::atomic<int> num_threads{1};
}
EXPORTED int get_num_threads() { return num_threads; }
EXPORTED void set_num_threads(int n) { num_threads = n; }
}  // namespace at
