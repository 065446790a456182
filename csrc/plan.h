// The slots of n tensors in a flat buffer, split once into chunks and tasks.
#pragma once
#include <cstdint>
#include <vector>

namespace pyengine {

// The order in which squares are added affects the result, which must have the same bits on every instruction
// set and on CUDA, so these numbers must not be tuned. Starting from the slot's first element:
//   segment  256 elements: element i is added to double lane i % 16, in order;
//   block    32 segments: their lanes are added lane by lane, in order; then the second half of the lanes is
//            added to the first half until one lane is left;
//   slot     block b is added to block lane b % 256, in order; then the block lanes are added by halves, too.
// Segments are short because a GPU needs many independent chains; sixteen lanes fit into CPU registers.
inline constexpr int64_t kSumLanes = 16;
inline constexpr int64_t kSegmentElements = 256;
inline constexpr int64_t kBlockElements = 8192;
inline constexpr int64_t kBlockLanes = 256;

// A part of one slot: two blocks, which are summed side by side. `begin` is the offset in elements from the
// slot's first element.
struct Chunk {
  int64_t slot, begin, count;
};
inline constexpr int64_t kChunkElements = 2 * kBlockElements;

// Tasks are runs of chunks with about this many elements in total, so that threads get equal work for any mix
// of slot sizes. 32768 is torch's own grain size: with fewer elements, waking a second thread costs more than
// it saves.
inline constexpr int64_t kTaskElements = 32768;

// The layout for CPU kernels. It uses plain pointers, because files compiled for one instruction set must not
// instantiate std templates that the linker could share with other files.
struct Layout {
  const int64_t* offsets;      // [num_slots] in elements, in the flat buffer
  const int64_t* numels;       // [num_slots]
  const int64_t* first_chunk;  // [num_slots + 1]
  const int64_t* first_of_task;  // [num_tasks + 1] chunk indices
  const Chunk* chunks;         // [num_chunks], in slot order
  int64_t num_slots, num_tasks, num_chunks;
  int64_t numel;               // sum of numels
};

// A chunk for CUDA kernels, with all values that a CTA looks up. The CTA reads most of them in one access.
struct alignas(32) DeviceChunk {
  int32_t slot, count;        // elements
  int32_t index, num_chunks;  // index among its slot's chunks, and their number
  int64_t in_flat;            // its first element in the flat buffer
};
static_assert(sizeof(DeviceChunk) == 4 * sizeof(int64_t));  // so that chunks can be copied as int64

// The layout for CUDA kernels, in device memory.
struct DeviceLayout {
  const DeviceChunk* chunks;   // [num_chunks], in slot order
  const int64_t* empty_slots;  // slots without elements
  int64_t num_slots, num_chunks, num_empty;
  int64_t numel;               // sum of numels
};

class BucketPlan {
 public:
  BucketPlan(std::vector<int64_t> offsets, std::vector<int64_t> numels);
  Layout layout() const;

  // The layout for CUDA kernels as one int64 array, to be copied to device memory that is aligned to 32
  // bytes, and the DeviceLayout that points into such a copy.
  int64_t num_words() const;
  void write_words(int64_t* words) const;
  DeviceLayout layout_at(const int64_t* words) const;

  const std::vector<int64_t>& numels() const { return numels_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }

  // First element of the first slot and end of the last slot, ignoring empty slots.
  int64_t first_element() const { return first_element_; }
  int64_t last_element() const { return last_element_; }

 private:
  std::vector<int64_t> offsets_, numels_, first_chunk_, first_of_task_, empty_slots_;
  std::vector<Chunk> chunks_;
  int64_t numel_ = 0, first_element_ = 0, last_element_ = 0;
};

}  // namespace pyengine
