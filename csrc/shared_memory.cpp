#include "shared_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <system_error>

namespace pyengine {
namespace {

// Size of a region's address space. The file has holes where nothing is allocated; offsets are never reused.
constexpr int64_t kRegionBytes = int64_t{1} << 42;

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

int64_t in_pages(int64_t bytes) {
  const int64_t page = page_bytes();
  return (bytes + page - 1) / page * page;
}

int64_t control_bytes(int world_size) {
  return in_pages(static_cast<int64_t>(sizeof(SharedControl) + sizeof(SharedPlace) * static_cast<size_t>(world_size)));
}

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void* map(int descriptor, int64_t offset, int64_t bytes) {
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, offset);
  if (data == MAP_FAILED) fail("mmap of shared memory");
  return data;
}

// The blocks of this process, for the fork handlers. The child gets copies of the blocks, made before the
// fork, because the parent continues to write to the file.
struct Blocks {
  std::mutex mutex;
  std::set<SharedBlock*> all;
  Blocks();
};

Blocks& blocks() {
  static Blocks* const found = new Blocks;  // never freed, because a tensor may be destroyed last at exit
  return *found;
}

Blocks::Blocks() {
  pthread_atfork(
      [] {
        blocks().mutex.lock();
        for (SharedBlock* block : blocks().all) block->copy_for_fork();
      },
      [] {
        for (SharedBlock* block : blocks().all) block->drop_copy();
        blocks().mutex.unlock();
      },
      [] {
        for (SharedBlock* block : blocks().all) block->become_copy();
        blocks().mutex.unlock();
      });
}

}  // namespace

SharedFile::SharedFile(int descriptor, int rank, int world_size)
    : descriptor_(descriptor), rank_(rank), pid_(getpid()), control_bytes_(control_bytes(world_size)),
      control_(map(descriptor, 0, control_bytes_)) {}

SharedFile::~SharedFile() {
  munmap(control_, static_cast<size_t>(control_bytes_));
  close(descriptor_);
}

bool SharedFile::is_mine() const { return getpid() == pid_; }

int64_t SharedFile::size(int world_size) { return control_bytes(world_size) + world_size * kRegionBytes; }

int64_t SharedFile::next_offset(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (taken_ + bytes > kRegionBytes) throw std::runtime_error("a rank's region of shared memory is used up");
  const int64_t offset = control_bytes_ + rank_ * kRegionBytes + taken_;
  taken_ += bytes;
  return offset;
}

int64_t SharedFile::take(int64_t bytes) {
  // Check before taking the lock, which another thread of the parent may have held at the fork.
  if (!is_mine()) throw std::runtime_error("this shared memory belongs to the process that this one was forked from");
  const int64_t offset = next_offset(bytes);
  // Allocate now: on first access, a lack of memory would raise a signal (SIGBUS).
  while (fallocate(descriptor_, 0, offset, bytes))
    if (errno != EINTR) fail("fallocate of shared memory");
  return offset;
}

SharedMapping::SharedMapping(const SharedFile& file, int64_t offset, int64_t bytes)
    : offset(offset), bytes(bytes), data(map(file.descriptor(), offset, bytes)) {}

SharedMapping::~SharedMapping() { munmap(data, static_cast<size_t>(bytes)); }

SharedBlock::SharedBlock(std::shared_ptr<SharedFile> file, int64_t bytes, int world_size)
    : file_(std::move(file)), bytes_(bytes), mapping_(*file_, file_->take(in_pages(bytes)), in_pages(bytes)),
      peers_(static_cast<size_t>(world_size)) {
  const std::lock_guard lock(blocks().mutex);
  blocks().all.insert(this);
}

SharedBlock::~SharedBlock() {
  {
    const std::lock_guard lock(blocks().mutex);
    blocks().all.erase(this);
  }
  if (file_->is_mine())
    fallocate(file_->descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, mapping_.offset, mapping_.bytes);
}

bool SharedBlock::holds(const void* begin, int64_t num_bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(begin), start = reinterpret_cast<uintptr_t>(data());
  return at >= start && at + static_cast<uintptr_t>(num_bytes) <= start + static_cast<uintptr_t>(bytes_);
}

void* SharedBlock::peer(int rank, int64_t offset, int64_t bytes) {
  std::unique_ptr<SharedMapping>& mapped = peers_[static_cast<size_t>(rank)];
  if (!mapped || mapped->offset != offset || mapped->bytes < bytes) {
    mapped.reset();
    mapped = std::make_unique<SharedMapping>(*file_, offset, in_pages(bytes));
  }
  return mapped->data;
}

void SharedBlock::copy_for_fork() {
  if (is_copy_) return;  // already private: the kernel copies it on write
  const auto size = static_cast<size_t>(mapping_.bytes);
  copy_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy_ != MAP_FAILED) std::memcpy(copy_, mapping_.data, size);
}

void SharedBlock::drop_copy() {
  if (copy_ != MAP_FAILED) munmap(copy_, static_cast<size_t>(mapping_.bytes));
  copy_ = MAP_FAILED;
}

void SharedBlock::become_copy() {
  if (is_copy_) return;
  const auto size = static_cast<size_t>(mapping_.bytes);
  if (copy_ != MAP_FAILED)
    mremap(copy_, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, mapping_.data);
  else  // no memory for a copy: pages show the parent's writes until this process writes to them
    mmap(mapping_.data, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file_->descriptor(), mapping_.offset);
  copy_ = MAP_FAILED;
  is_copy_ = true;
}

}  // namespace pyengine
