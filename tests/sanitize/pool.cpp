// Every op on the core's own threads, by two callers at once, as ThreadSanitizer sees it; results must have the bits of
// one thread. Then arenas of two ranks, which one thread each serves while others allocate. `pool race` lets two threads
// write one number: the sanitizer must end that.
#ifdef PYENGINE_SHARED
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/dispatch.h"
#include "plan.h"
#ifdef PYENGINE_SHARED
#include "shared_arena.h"
#endif
#include "torch_shim.h"

namespace at {
void set_num_threads(int n);
}

using namespace pyengine;

namespace {

using Bytes = std::vector<unsigned char>;

// Slots from multiples of 64 on, as exact sums need them: empty ones, around a chunk, several chunks.
BucketPlan make_plan(int64_t largest) {
  std::vector<int64_t> offsets, numels{0, 1, 17, 16384, 16385, 0, 8191, 70001, largest, 3};
  int64_t end = 0;
  for (int64_t numel : numels) {
    offsets.push_back(end);
    end += (numel + 63) / 64 * 64 + 64;
  }
  return {offsets, numels};
}

// Finite numbers of either sign over some binades, and one inf a slot.
std::vector<uint16_t> make_bf16(int64_t numel) {
  std::vector<uint16_t> values(static_cast<size_t>(numel));
  uint32_t state = 1;
  for (uint16_t& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<uint16_t>((state >> 16 & 0x83ff) | 0x3c00);
  }
  if (numel > 0) values[static_cast<size_t>(numel / 2)] = 0x7f80;
  return values;
}

template <class T>
void append(Bytes& all, const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  all.insert(all.end(), bytes, bytes + values.size() * sizeof(T));
}

void run_exact(const Layout& layout, const Tensors& grads, int64_t numel, Bytes& all) {
  const auto size = static_cast<size_t>(numel);
  const int64_t num_blocks = numel / kExactBlock;
  std::vector<int32_t> hi(size), lo(size);
  std::vector<uint8_t> bins(size / kExactBlock), larger(bins.size(), 9), flags(static_cast<size_t>(layout.num_slots));
  std::vector<float> out(size);
  const ExactSum sum{hi.data(), lo.data(), bins.data(), num_blocks, 21};
  ops().exact_deposit(layout, {sum, grads, true, flags.data()});
  ops().exact_deposit(layout, {sum, grads, false, flags.data()});
  for (size_t block = 0; block < bins.size(); ++block) larger[block] = std::max(larger[block], bins[block]);
  ops().exact_align(layout, {sum, larger.data()});
  ops().exact_round(layout, {sum, {out.data(), DType::f32}});
  append(all, bins);
  append(all, flags);
  for (float& value : out) value = value != value ? 0 : value;
  append(all, out);
}

// Returns all that the ops wrote.
Bytes run_every_op(const BucketPlan& plan) {
  const Layout layout = plan.layout();
  const auto num_slots = static_cast<size_t>(layout.num_slots);
  const int64_t numel = (plan.last_element() + 63) / 64 * 64;
  std::vector<std::vector<uint16_t>> grads, back;
  std::vector<void*> grads_at, back_at;
  for (int64_t of_slot : plan.numels()) grads.push_back(make_bf16(of_slot)), back.emplace_back(grads.back());
  for (size_t slot = 0; slot < num_slots; ++slot) {
    grads_at.push_back(slot == 2 ? nullptr : grads[slot].data());
    back_at.push_back(back[slot].data());
  }
  const Tensors read{grads_at.data(), DType::bf16}, written{back_at.data(), DType::bf16};
  std::vector<float> acc(static_cast<size_t>(numel));
  std::vector<uint16_t> wire(static_cast<size_t>(numel));
  std::vector<uint8_t> flags(num_slots);
  std::vector<double> sumsq(num_slots), partials(static_cast<size_t>(2 * layout.num_chunks));
  const float scale = 0.3f;
  ops().accumulate(layout, {acc.data(), read, &scale, true, flags.data()});
  ops().accumulate(layout, {acc.data(), read, &scale, false, flags.data()});
  ops().accumulate_cast(layout, {{wire.data(), DType::fp16}, acc.data(), read, &scale, &scale, false, flags.data()});
  ops().unpack(layout, {{wire.data(), DType::fp16}, written, &scale});
  ops().unscale_norm(layout, {written, written, &scale, partials.data(), sumsq.data(), flags.data()});
  ops().pack(layout, {{acc.data(), DType::f32}, written, &scale});
  Bytes all;
  append(all, acc);
  append(all, wire);
  append(all, flags);
  append(all, sumsq);
  run_exact(layout, read, numel, all);
  return all;
}

bool runs_alike(const char* isa, const BucketPlan& plan) {
  at::set_num_threads(1);
  const Bytes want = run_every_op(plan);
  bool same = true;
  for (int threads = 2; threads <= 4; ++threads) {
    at::set_num_threads(threads);
    Bytes one, two;
    std::thread other([&] { one = run_every_op(plan); });
    two = run_every_op(plan);
    other.join();
    if (one != want || two != want) {
      std::printf("%s: other bits on %d threads than on one\n", isa, threads);
      same = false;
    }
  }
  return same;
}

#ifdef PYENGINE_SHARED
// Sums over two ranks in memory that has to be copied, while another thread takes blocks.
bool arenas_sum() {
  const int made = memfd_create("pool", 0);
  if (made < 0 || ftruncate(made, SharedFile::size(2))) return false;
  SharedArena one(dup(made), 0, 2), two(dup(made), 1, 2);
  auto serve = [](SharedArena& arena) { arena.serve([](double) {}, [](const std::shared_ptr<SharedJob>&) {}); };
  std::thread first(serve, std::ref(one)), second(serve, std::ref(two));
  bool is_zero = true;
  std::thread other([&] {
    for (int block = 0; block < 20; ++block) {
      const auto taken = one.allocate(1 << 20);
      for (int64_t i = 0; i < taken->bytes(); i += 512) is_zero &= !static_cast<const char*>(taken->data())[i];
    }
  });
  bool is_sum = true;
  for (int turn = 0; turn < 20; ++turn) {
    std::vector<float> left(1000, 1.0f), right(1000, 2.0f);
    const auto a = one.submit(left.data(), 1000, SharedKind::sum_f32);
    const auto b = two.submit(right.data(), 1000, SharedKind::sum_f32);
    is_sum &= one.wait(*a, 60) && two.wait(*b, 60) && left[999] == 3.0f && right[0] == 3.0f;
  }
  other.join();
  one.close(), two.close();
  first.join(), second.join();
  close(made);
  std::printf("arenas: done\n");
  return is_zero && is_sum;
}
#else
bool arenas_sum() { return true; }
#endif

int race() {
  at::set_num_threads(2);
  int number = 0;
  parallel_for(2, [](int64_t, int64_t, void* p) { ++*static_cast<int*>(p); }, &number);
  return number;
}

}  // namespace

int main(int argc, char** argv) {
  if (std::strcmp(thread_pool(), "std::thread")) {
    std::printf("ops run on %s; needed std::thread\n", thread_pool());
    return 1;
  }
  if (argc > 1 && !std::strcmp(argv[1], "race")) return race() < 0;
  bool same = true;
  for (const char* isa : {"generic", "avx2", "avx512"}) {
    if (!set_isa(isa)) continue;
    // The second is beyond the 8 MiB from which stores are streamed.
    for (int64_t largest : {int64_t{100000}, int64_t{2200000}}) same &= runs_alike(isa, make_plan(largest));
    std::printf("%s: done\n", isa);
  }
  return !(same && arenas_sum());
}
