// Memory shared by the processes of one host: an unnamed file that exists as long as a process has it open or
// mapped, so nothing outlives the processes. Each process allocates blocks from its own region and maps other
// processes' blocks as needed. Linux only; pyengine/comm/arena.py creates and opens the file.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pyengine {

// State that one process publishes to the others. Except for the atomics, its fields are written before
// `reached` is incremented, and other processes read them after they have seen the increment.
struct alignas(128) SharedPlace {
  std::atomic<uint64_t> reached;  // number of barriers reached
  std::atomic<uint32_t> has_left;
  int32_t kind;
  int64_t numel;
  int64_t block, block_bytes, begin;  // the buffer's block in the file (-1: none) and offset in the block
  int64_t staging;                    // offset of the process's staging block
};

// The header of the file.
struct alignas(128) SharedControl {
  unsigned char token[16];        // written by the process that created the file
  std::atomic<uint32_t> changes;  // number of published changes; waiters sleep on it
  std::atomic<uint32_t> broken;   // whether a process has given up
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// The shared file: a header, a SharedPlace for every process, and a region for every process.
class SharedFile {
 public:
  // Takes ownership of the descriptor.
  SharedFile(int descriptor, int rank, int world_size);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  SharedControl& control() const { return *static_cast<SharedControl*>(control_); }
  SharedPlace& place(int rank) const { return reinterpret_cast<SharedPlace*>(&control() + 1)[rank]; }
  int descriptor() const { return descriptor_; }
  bool is_mine() const;      // false in a process forked from the one that created this object
  // Reserves zeroed pages of this process's region and returns their offset. May be called by any thread; a
  // forked process has no region.
  int64_t take(int64_t bytes);

  // The size that the file must have.
  static int64_t size(int world_size);

 private:
  int64_t next_offset(int64_t bytes);

  const int descriptor_, rank_, pid_;
  const int64_t control_bytes_;
  std::mutex mutex_;
  int64_t taken_ = 0;  // guarded by the mutex
  void* control_;
};

// A mapped range of the file.
class SharedMapping {
 public:
  SharedMapping(const SharedFile& file, int64_t offset, int64_t bytes);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  const int64_t offset, bytes;
  void* const data;
};

// Memory of this process that other processes can map. A forked process has a copy of the content at the time
// of the fork.
class SharedBlock {
 public:
  SharedBlock(std::shared_ptr<SharedFile> file, int64_t bytes, int world_size);
  ~SharedBlock();  // frees the pages immediately, even while other processes map them
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  void* data() const { return mapping_.data; }
  int64_t bytes() const { return bytes_; }
  int64_t offset() const { return mapping_.offset; }
  bool holds(const void* begin, int64_t num_bytes) const;
  // Maps another process's block that takes part in collectives with this block. The mapping lasts until
  // another block replaces it or this block is destroyed.
  void* peer(int rank, int64_t offset, int64_t bytes);
  // Fork handlers: before the fork, after the fork in the parent, and after the fork in the child.
  void copy_for_fork();
  void drop_copy();
  void become_copy();

 private:
  const std::shared_ptr<SharedFile> file_;
  const int64_t bytes_;
  SharedMapping mapping_;
  void* copy_ = MAP_FAILED;  // during a fork
  bool is_copy_ = false;     // in a forked process
  std::vector<std::unique_ptr<SharedMapping>> peers_;
};

}  // namespace pyengine
