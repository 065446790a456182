// Memory that processes of one host share: a file without a name, which lives as long as somebody has it open or
// mapped, so nothing outlives the processes. Each of them takes blocks from a region of its own and maps others' where
// it needs them. Linux; the file is made and opened by pyengine/comm/arena.py.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pyengine {

// What one process tells the others. Its fields but the atomics are written before `reached` is raised, and read by
// others once they have seen that.
struct alignas(128) SharedPlace {
  std::atomic<uint64_t> reached;  // points at which all meet, counted
  std::atomic<uint32_t> has_left;
  int32_t kind;
  int64_t numel;
  int64_t block, block_bytes, begin;  // where its buffer lies: offset in the file, -1: elsewhere; and within the block
  int64_t staging;                    // offset of its staging block
};

// The beginning of the file.
struct alignas(128) SharedControl {
  unsigned char token[16];        // written by its maker
  std::atomic<uint32_t> changes;  // counts what anybody tells; waited for
  std::atomic<uint32_t> broken;   // whether somebody has given up
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// The file; `bytes` a region, a place for every process at its beginning.
class SharedFile {
 public:
  // Takes the descriptor over.
  SharedFile(int descriptor, int rank, int world_size);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  SharedControl& control() const { return *static_cast<SharedControl*>(control_); }
  SharedPlace& place(int rank) const { return reinterpret_cast<SharedPlace*>(&control() + 1)[rank]; }
  int descriptor() const { return descriptor_; }
  bool is_mine() const;      // false in a process that was forked from the one that made this
  // Reserves pages of this process's region, which are zero; their offset. Called by any thread; a fork has no region.
  int64_t take(int64_t bytes);

  // Bytes that the file must have.
  static int64_t size(int world_size);

 private:
  int64_t next_offset(int64_t bytes);

  const int descriptor_, rank_, pid_;
  const int64_t control_bytes_;
  std::mutex mutex_;
  int64_t taken_ = 0;  // by the mutex
  void* control_;
};

// Some of the file, mapped.
class SharedMapping {
 public:
  SharedMapping(const SharedFile& file, int64_t offset, int64_t bytes);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  const int64_t offset, bytes;
  void* const data;
};

// Memory of this process that the others can see. A forked process has a copy of what it was at the fork.
class SharedBlock {
 public:
  SharedBlock(std::shared_ptr<SharedFile> file, int64_t bytes, int world_size);
  ~SharedBlock();  // its pages are freed at once, whoever else maps them
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  void* data() const { return mapping_.data; }
  int64_t bytes() const { return bytes_; }
  int64_t offset() const { return mapping_.offset; }
  bool holds(const void* begin, int64_t num_bytes) const;
  // Another process's block, which meets this one in collectives: mapped until another one does, or this one goes.
  void* peer(int rank, int64_t offset, int64_t bytes);
  // Around a fork: before it, behind it in the parent, and behind it in the child.
  void copy_for_fork();
  void drop_copy();
  void become_copy();

 private:
  const std::shared_ptr<SharedFile> file_;
  const int64_t bytes_;
  SharedMapping mapping_;
  void* copy_ = MAP_FAILED;  // during a fork
  bool is_copy_ = false;     // in a fork
  std::vector<std::unique_ptr<SharedMapping>> peers_;
};

}  // namespace pyengine
