#include "shared_arena.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <stdexcept>

#include "cpu/dispatch.h"

namespace pyengine {
namespace {

using Clock = std::chrono::steady_clock;

// Number of spins before the core is yielded to other threads; they take a microsecond or two.
constexpr int kSpins = 50;
constexpr double kTickSeconds = 0.25;
// Data is copied to shared memory in pieces that stay in the caches (measured with 64 KiB to 64 MiB).
constexpr int64_t kPieceBytes = 512 << 10;
// Shares begin at multiples of this number, so that no two ranks write to the same cache line.
constexpr int64_t kShareElements = 128;

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

double seconds_since(Clock::time_point then) { return std::chrono::duration<double>(Clock::now() - then).count(); }

void* plus(void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; }

}  // namespace

// ---- functions that any thread may call ----

SharedArena::SharedArena(int descriptor, int rank, int world_size)
    : file_(std::make_shared<SharedFile>(descriptor, rank, world_size)), rank_(rank), world_size_(world_size) {}

std::shared_ptr<SharedBlock> SharedArena::allocate(int64_t bytes) {
  auto block = std::make_shared<SharedBlock>(file_, bytes, world_size_);
  const std::lock_guard lock(mutex_);
  std::erase_if(blocks_, [](const auto& other) { return other.expired(); });
  blocks_.push_back(block);
  return block;
}

std::shared_ptr<SharedJob> SharedArena::submit(void* data, int64_t numel, SharedKind kind) {
  auto job = std::make_shared<SharedJob>(data, numel, kind);
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) throw std::runtime_error("this rank has left the shared memory of its host");
    queue_.push_back(job);
  }
  changed_.notify_all();
  return job;
}

bool SharedArena::wait(const SharedJob& job, double seconds) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return job.is_done_; });
}

std::string SharedArena::error(const SharedJob& job) {
  const std::lock_guard lock(mutex_);
  return job.error_;
}

bool SharedArena::call_back(SharedJob& job) {
  const std::lock_guard lock(mutex_);
  return job.calls_back_ = !job.is_done_;
}

void SharedArena::fail(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = why;
  }
  has_failed_ = true;
  file_->control().broken.store(1, std::memory_order_release);
  tell();
}

std::string SharedArena::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void SharedArena::close() {
  {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
  file_->place(rank_).has_left.store(1, std::memory_order_release);
  tell();
}

std::vector<int> SharedArena::missing() const {
  std::vector<int> found;
  for (int rank = 0; rank < world_size_; ++rank)
    if (file_->place(rank).reached.load(std::memory_order_acquire) < point_) found.push_back(rank);
  return found;
}

// ---- the queue ----

void SharedArena::serve(const OnWait& on_wait, const OnDone& on_done) {
  while (const std::shared_ptr<SharedJob> job = next()) {
    std::string error;
    try {
      run(*job, on_wait);
    } catch (const std::exception& thrown) {
      error = thrown.what();
      fail(error);
    }
    if (finish(*job, error)) on_done(job);
  }
}

// Returns null once this rank has left and all jobs have failed.
std::shared_ptr<SharedJob> SharedArena::next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_closed_ || !queue_.empty(); });
  if (!is_closed_) return queue_.front();
  for (const auto& job : queue_) {
    job->is_done_ = true;
    job->error_ = "this rank has left the shared memory of its host";
  }
  queue_.clear();
  changed_.notify_all();
  return nullptr;
}

// Marks the job as done; returns whether it has a callback.
bool SharedArena::finish(SharedJob& job, const std::string& error) {
  const std::lock_guard lock(mutex_);
  job.is_done_ = true;
  job.error_ = error;
  queue_.pop_front();
  changed_.notify_all();
  return job.calls_back_;
}

// ---- synchronization with other ranks ----

void SharedArena::tell() {
  std::atomic<uint32_t>& changes = file_->control().changes;
  changes.fetch_add(1, std::memory_order_acq_rel);
  syscall(SYS_futex, &changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedArena::arrive() {
  file_->place(rank_).reached.store(++point_, std::memory_order_release);
  tell();
}

bool SharedArena::have_arrived() const {
  for (int rank = 0; rank < world_size_; ++rank)
    if (file_->place(rank).reached.load(std::memory_order_acquire) < point_) return false;
  return true;
}

void SharedArena::check_going() {
  if (has_failed_) throw std::runtime_error(failure());
  if (is_closed_) throw std::runtime_error("this rank has left the shared memory of its host");
  if (file_->control().broken.load(std::memory_order_acquire))
    throw std::runtime_error("another rank of this host has given up a collective in shared memory");
  for (int rank : missing())
    if (file_->place(rank).has_left.load(std::memory_order_acquire) && !have_arrived())
      throw std::runtime_error("another rank of this host has closed or dropped its engine");
}

void SharedArena::await(const OnWait& on_wait) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (have_arrived()) return;
    pause_core();
  }
  std::atomic<uint32_t>& changes = file_->control().changes;
  const Clock::time_point since = Clock::now();
  double due = kTickSeconds;
  while (true) {
    const uint32_t seen = changes.load(std::memory_order_acquire);
    if (have_arrived()) return;
    check_going();
    futex_wait(changes, seen, std::max(0.0, due - seconds_since(since)));
    if (const double waited = seconds_since(since); waited >= due) {
      on_wait(waited);
      due = seconds_since(since) + kTickSeconds;
    }
  }
}

// ---- collectives ----

void SharedArena::post(const SharedJob& job, const SharedBlock* block) {
  SharedPlace& mine = file_->place(rank_);
  mine.kind = static_cast<int32_t>(job.kind);
  mine.numel = job.numel;
  mine.block = block ? block->offset() : -1;
  mine.block_bytes = block ? block->bytes() : 0;
  mine.begin = block ? static_cast<char*>(job.data) - static_cast<char*>(block->data()) : 0;
}

bool SharedArena::is_alike() const {
  const SharedPlace& first = file_->place(0);
  for (int rank = 1; rank < world_size_; ++rank)
    if (file_->place(rank).kind != first.kind || file_->place(rank).numel != first.numel) return false;
  return true;
}

SharedArena::Range SharedArena::share(int64_t n, int rank) const {
  const int64_t units = (n + kShareElements - 1) / kShareElements;
  return {std::min(n, units * rank / world_size_ * kShareElements),
          std::min(n, units * (rank + 1) / world_size_ * kShareElements)};
}

std::shared_ptr<SharedBlock> SharedArena::block_of(const SharedJob& job) {
  const std::lock_guard lock(mutex_);
  for (const auto& weak : blocks_)
    if (auto block = weak.lock(); block && block->holds(job.data, job.bytes())) return block;
  return nullptr;
}

void SharedArena::run(const SharedJob& job, const OnWait& on_wait) {
  check_going();
  const std::shared_ptr<SharedBlock> block = block_of(job);
  post(job, block.get());
  meet(on_wait);
  if (!is_alike())
    throw std::runtime_error("ranks of this host are in different collectives, or pass different sizes or types");
  bool is_in_place = true;
  for (int rank = 0; rank < world_size_; ++rank) is_in_place &= file_->place(rank).block >= 0;
  if (is_in_place)
    run_in_place(job, *block, on_wait);
  else
    run_staged(job, on_wait);
}

// Every rank writes the result of its share into the buffers of all ranks.
void SharedArena::run_in_place(const SharedJob& job, SharedBlock& block, const OnWait& on_wait) {
  const Range mine = share(job.numel, rank_);
  const int64_t offset = mine.begin * shared_bytes(job.kind);
  Pointers parts;
  for (int rank = 0; rank < world_size_; ++rank) {
    const SharedPlace& place = file_->place(rank);
    void* data = rank == rank_ ? job.data : plus(block.peer(rank, place.block, place.block_bytes), place.begin);
    parts.push_back(plus(data, offset));
  }
  ops().shared_sum({job.kind, parts.data(), world_size_, parts.data(), world_size_, mine.end - mine.begin});
  meet(on_wait);
}

// For each piece, every rank copies the other ranks' shares of its buffer to its staging block, combines its
// own share, and copies the other ranks' results. Pieces alternate between the two halves of the staging
// block. When all ranks have met for a piece, they have finished reading the previous piece, so its half can
// be overwritten.
void SharedArena::run_staged(const SharedJob& job, const OnWait& on_wait) {
  if (!staging_) staging_ = std::make_shared<SharedBlock>(file_, 2 * kPieceBytes, world_size_);
  file_->place(rank_).staging = staging_->offset();
  meet(on_wait);
  const int64_t size = shared_bytes(job.kind), piece = kPieceBytes / size;
  auto staged = [&](int rank, int64_t begin, int64_t from) {
    void* data = rank == rank_ ? staging_->data() : staging_->peer(rank, file_->place(rank).staging, 2 * kPieceBytes);
    return plus(data, begin / piece % 2 * kPieceBytes + from * size);
  };
  auto show = [&](int64_t begin) {
    for (int rank = 0; rank < world_size_; ++rank) {
      const Range part = share(std::min(piece, job.numel - begin), rank);
      if (rank != rank_)
        std::memcpy(staged(rank_, begin, part.begin), plus(job.data, (begin + part.begin) * size),
                    static_cast<size_t>((part.end - part.begin) * size));
    }
  };
  if (job.numel > 0) show(0);
  for (int64_t begin = 0; begin < job.numel; begin += piece) {
    const int64_t n = std::min(piece, job.numel - begin);
    meet(on_wait);
    const Range mine = share(n, rank_);
    void* const own = plus(job.data, (begin + mine.begin) * size);
    Pointers sources;
    for (int rank = 0; rank < world_size_; ++rank)
      sources.push_back(rank == rank_ ? own : staged(rank, begin, mine.begin));
    void* const targets[] = {own, staged(rank_, begin, mine.begin)};
    ops().shared_sum({job.kind, sources.data(), world_size_, targets, 2, mine.end - mine.begin});
    arrive();
    if (begin + piece < job.numel) show(begin + piece);
    await(on_wait);
    for (int rank = 0; rank < world_size_; ++rank) {
      const Range part = share(n, rank);
      if (rank != rank_)
        std::memcpy(plus(job.data, (begin + part.begin) * size), staged(rank, begin, part.begin),
                    static_cast<size_t>((part.end - part.begin) * size));
    }
  }
  meet(on_wait);
}

}  // namespace pyengine
