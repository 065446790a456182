// Runs a grid on one CPU thread: see cuda_runtime.h.
#undef _FORTIFY_SOURCE  // it takes a jump from one fiber's stack to another's for an error
#include "cuda_runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#ifdef __linux__
#include <link.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

constexpr unsigned kWarp = 32, kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;  // a kernel's parameters, up to 32 KiB, lie on it

enum class State { ready, at_block, at_warp, done };

struct Fiber {
  State state = State::done;
  Site site{};
  unsigned mask = 0, delta = 0;
  bool is_xor = false;
  uint64_t value = 0;  // handed in, then what comes back
  bool started = false;
  jmp_buf resume;
  ucontext_t first;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
};

// What a launch is about. One at a time: the caller holds Python's lock or is alone.
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* current;
jmp_buf scheduler;
const std::function<void()>* body;
std::string failure;
cudaError_t last_error = cudaSuccess;
std::set<const void*> loaded;
enum class Order { forward, reversed, shuffled } order;

// ---- fibers ----

// Switches by setjmp, because swapcontext asks the kernel for the signal mask every time.
void leave() {
  if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    (*body)();
    current->state = State::done;
    leave();
  }
}

void start(Fiber& fiber) {
  fiber.started = true;
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = fiber.stack.get();
  fiber.first.uc_stack.ss_size = kStackBytes;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, fiber_main, 0);
  setcontext(&fiber.first);
}

void run(unsigned thread) {
  current = fibers[thread].get();
  threadIdx = {thread, 0, 0};
  if (_setjmp(scheduler)) return;
  if (!current->started) start(*current);
  _longjmp(current->resume, 1);
}

// A failed kernel is abandoned in the middle: its fibers start afresh next time.
[[noreturn]] void fail_in_fiber(std::string message) {
  failure = std::move(message);
  leave();
  std::abort();
}

std::string text(const void* address) { return std::to_string(reinterpret_cast<uintptr_t>(address)); }

std::string this_thread() {
  return "thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x);
}

// ---- barriers ----

std::string text(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

bool same(const Fiber& a, const Fiber& b) {
  if (a.state != b.state || a.state == State::done) return a.state == b.state;
  return a.site.line == b.site.line && !std::strcmp(a.site.file, b.site.file);
}

bool all_like_first(unsigned begin, unsigned end) {
  for (unsigned i = begin; i < end; ++i)
    if (!same(*fibers[i], *fibers[begin])) return false;
  return true;
}

bool release_warp(unsigned begin) {
  if (fibers[begin]->state != State::at_warp || !all_like_first(begin, begin + kWarp)) return false;
  uint64_t handed_in[kWarp];
  for (unsigned i = 0; i < kWarp; ++i) handed_in[i] = fibers[begin + i]->value;
  for (unsigned i = 0; i < kWarp; ++i) {
    Fiber& fiber = *fibers[begin + i];
    const unsigned from = fiber.is_xor ? i ^ fiber.delta : i + fiber.delta;
    if (from < kWarp) fiber.value = handed_in[from];
    fiber.state = State::ready;
  }
  return true;
}

bool release_block() {
  if (fibers[0]->state != State::at_block || !all_like_first(0, blockDim.x)) return false;
  uint64_t any = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) any |= fibers[i]->value;
  for (unsigned i = 0; i < blockDim.x; ++i) {
    fibers[i]->value = any;
    fibers[i]->state = State::ready;
  }
  return true;
}

// Every thread waits or is done, yet no barrier is complete.
std::string describe_divergence() {
  std::string message = "threads of a block wait for each other at different places:";
  for (unsigned i = 0; i < blockDim.x;) {
    const unsigned begin = i;
    while (i < blockDim.x && same(*fibers[i], *fibers[begin])) ++i;
    const Fiber& fiber = *fibers[begin];
    message += " " + std::to_string(begin) + ".." + std::to_string(i - 1) +
               (fiber.state == State::done ? " have ended;" : " at " + text(fiber.site) + ";");
  }
  return message;
}

bool release_any() {
  bool any = release_block();
  for (unsigned warp = 0; warp < blockDim.x; warp += kWarp) any |= release_warp(warp);
  return any;
}

// ---- a grid ----

#ifdef __linux__
// The thread-local storage of the module that this file is part of.
struct Storage {
  char* data = nullptr;
  size_t bytes = 0;
};

thread_local char in_this_module;

int find_storage(dl_phdr_info* info, size_t, void* result) {
  Storage& storage = *static_cast<Storage*>(result);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    char* data = static_cast<char*>(info->dlpi_tls_data);
    if (header.p_type != PT_TLS || !data || &in_this_module < data || &in_this_module >= data + header.p_memsz) continue;
    storage = {data, header.p_memsz};
    return 1;
  }
  return 0;
}

// Shared memory holds anything when a block begins: NaN here, whatever the type. What else the module keeps in
// thread-local storage (pybind11 does) comes back afterwards.
class SharedMemory {
 public:
  SharedMemory() {
    dl_iterate_phdr(find_storage, &storage_);
    kept_.assign(storage_.data, storage_.data + storage_.bytes);
  }
  ~SharedMemory() { std::copy(kept_.begin(), kept_.end(), storage_.data); }
  void poison() { std::memset(storage_.data, 0xff, storage_.bytes); }

 private:
  Storage storage_;
  std::vector<char> kept_;
};
#else
struct SharedMemory {
  void poison() {}
};
#endif

// While it lives, a touch of memory that is not there fails the kernel instead of the process.
class CatchFaults {
 public:
  CatchFaults() {
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t* info, void*) {
      fail_in_fiber(this_thread() + " touches address " + text(info->si_addr) + ", which is not there");
    };
    action.sa_flags = SA_SIGINFO | SA_NODEFER;  // left by a jump, so it must not block the next one
    sigaction(SIGSEGV, &action, &before_[0]);
    sigaction(SIGBUS, &action, &before_[1]);
  }
  ~CatchFaults() {
    sigaction(SIGSEGV, &before_[0], nullptr);
    sigaction(SIGBUS, &before_[1], nullptr);
  }

 private:
  struct sigaction before_[2];
};

std::vector<unsigned> in_order(unsigned n) {
  std::vector<unsigned> indices(n);
  std::iota(indices.begin(), indices.end(), 0u);
  if (order == Order::reversed) std::reverse(indices.begin(), indices.end());
  if (order == Order::shuffled) std::shuffle(indices.begin(), indices.end(), std::mt19937(n));
  return indices;
}

bool run_ready(const std::vector<unsigned>& threads) {
  bool any = false;
  for (unsigned thread : threads) {
    if (fibers[thread]->state != State::ready) continue;
    run(thread);
    if (!failure.empty()) return false;
    any = true;
  }
  return any;
}

void run_block(const std::vector<unsigned>& threads) {
  for (unsigned thread : threads) fibers[thread]->state = State::ready;
  while (run_ready(threads)) {
    if (release_any()) continue;
    const bool done = std::all_of(threads.begin(), threads.end(), [](unsigned i) { return fibers[i]->state == State::done; });
    if (!done) failure = describe_divergence();
    return;
  }
}

void run_grid() {
  CatchFaults faults;
  SharedMemory shared;
  const std::vector<unsigned> threads = in_order(blockDim.x);
  for (unsigned block : in_order(gridDim.x)) {
    blockIdx = {block, 0, 0};
    shared.poison();
    run_block(threads);
    if (!failure.empty()) return;
  }
}

}  // namespace

// ---- called from kernels ----

int wait_for_block(int predicate, Site site) {
  current->state = State::at_block;
  current->site = site;
  current->value = predicate != 0;
  leave();
  return static_cast<int>(current->value);
}

uint64_t wait_for_warp(unsigned mask, uint64_t value, unsigned delta, bool is_xor, Site site) {
  if (mask != 0xffffffffu) fail_in_fiber(text(site) + ": the emulator knows shuffles of whole warps only");
  current->state = State::at_warp;
  current->site = site;
  current->value = value;
  current->delta = delta;
  current->is_xor = is_xor;
  leave();
  return current->value;
}

void check_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  fail_in_fiber(this_thread() + " accesses " + std::to_string(bytes) + " bytes at address " + text(address) +
                ", which is not a multiple of that");
}

// ---- called from the host ----

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& thread) {
  if (!loaded.count(kernel)) throw std::runtime_error("a kernel is launched that was not loaded before");
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (grid.x == 0 || block.x == 0 || block.x > kMaxThreads) return last_error = cudaErrorInvalidConfiguration;
  if (grid.y * grid.z * block.y * block.z != 1 || block.x % kWarp != 0)
    throw std::runtime_error("the emulator knows one dimension and whole warps only");
  gridDim = grid, blockDim = block, body = &thread;
  while (fibers.size() < block.x) fibers.push_back(std::make_unique<Fiber>());
  run_grid();
  if (failure.empty()) return cudaSuccess;
  for (auto& fiber : fibers) fiber->started = false;
  throw std::runtime_error(std::exchange(failure, {}));
}

}  // namespace emulator

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  emulator::loaded.insert(kernel);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}

// As if the process were new.
extern "C" __attribute__((visibility("default"))) void emulator_unload() { emulator::loaded.clear(); }

// 0: blocks, and threads between two barriers, run in order; 1: from the last to the first; 2: shuffled.
extern "C" __attribute__((visibility("default"))) void emulator_set_order(int order) {
  emulator::order = static_cast<emulator::Order>(order);
}
