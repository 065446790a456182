// Shared-memory collectives among the ranks of one host. One thread of each rank runs them in the order of
// submission, which must be the same on all ranks.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shared_kind.h"
#include "shared_memory.h"

namespace pyengine {

// One collective of this rank.
class SharedJob {
 public:
  SharedJob(void* data, int64_t numel, SharedKind kind) : data(data), numel(numel), kind(kind) {}
  int64_t bytes() const { return numel * shared_bytes(kind); }

  void* const data;
  const int64_t numel;
  const SharedKind kind;

 private:
  friend class SharedArena;
  bool is_done_ = false, calls_back_ = false;  // guarded by the arena's mutex, like all members below
  std::string error_;
};

class SharedArena {
 public:
  // Called from time to time by the serving thread while it waits for other ranks. The argument is the number
  // of seconds that it has waited.
  using OnWait = std::function<void(double)>;
  // Called by the serving thread when a job with a callback is done.
  using OnDone = std::function<void(const std::shared_ptr<SharedJob>&)>;

  SharedArena(int descriptor, int rank, int world_size);

  std::shared_ptr<SharedBlock> allocate(int64_t bytes);
  // Combines `numel` elements over all ranks in place. The memory must stay valid until the job is done. If
  // it lies in blocks from `allocate` on all ranks, it is used directly; otherwise it is copied.
  std::shared_ptr<SharedJob> submit(void* data, int64_t numel, SharedKind kind);
  // Runs jobs until `close`.
  void serve(const OnWait& on_wait, const OnDone& on_done);
  // Waits for a job; returns whether it is done.
  bool wait(const SharedJob& job, double seconds);
  // The error of a finished job; empty if it succeeded.
  std::string error(const SharedJob& job);
  // Requests an OnDone call when the job is done; returns false if the job is already done.
  bool call_back(SharedJob& job);
  // Makes all jobs fail from now on, on this rank and on the other ranks.
  void fail(const std::string& why);
  // The ranks that the running job is waiting for.
  std::vector<int> missing() const;
  // Ends `serve`. Unfinished jobs fail, and ranks waiting for this rank learn that it has left.
  void close();

 private:
  using Pointers = std::vector<void*>;
  struct Range { int64_t begin, end; };

  std::shared_ptr<SharedJob> next();
  bool finish(SharedJob& job, const std::string& error);
  void run(const SharedJob& job, const OnWait& on_wait);
  void run_in_place(const SharedJob& job, SharedBlock& block, const OnWait& on_wait);
  void run_staged(const SharedJob& job, const OnWait& on_wait);
  void post(const SharedJob& job, const SharedBlock* block);
  bool is_alike() const;
  Range share(int64_t n, int rank) const;
  std::shared_ptr<SharedBlock> block_of(const SharedJob& job);
  // A barrier: waits until every rank has called this the same number of times.
  void meet(const OnWait& on_wait) { arrive(), await(on_wait); }
  void arrive();
  void await(const OnWait& on_wait);
  bool have_arrived() const;
  void check_going();
  void tell();
  std::string failure();

  const std::shared_ptr<SharedFile> file_;
  const int rank_, world_size_;
  uint64_t point_ = 0;
  std::shared_ptr<SharedBlock> staging_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<SharedJob>> queue_;
  std::vector<std::weak_ptr<SharedBlock>> blocks_;
  std::string failure_;
  std::atomic<bool> has_failed_ = false, is_closed_ = false;
};

}  // namespace pyengine
