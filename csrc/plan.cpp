#include "plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pyengine {
namespace {

constexpr size_t kChunkWords = sizeof(DeviceChunk) / sizeof(int64_t);

}  // namespace

BucketPlan::BucketPlan(std::vector<int64_t> offsets, std::vector<int64_t> numels)
    : offsets_(std::move(offsets)), numels_(std::move(numels)) {
  first_of_task_.push_back(0);
  int64_t in_task = 0;
  for (size_t slot = 0; slot < numels_.size(); ++slot) {
    first_chunk_.push_back(static_cast<int64_t>(chunks_.size()));
    for (int64_t begin = 0; begin < numels_[slot]; begin += kChunkElements) {
      const int64_t count = std::min(kChunkElements, numels_[slot] - begin);
      chunks_.push_back({static_cast<int64_t>(slot), begin, count});
      in_task += count;
      if (in_task >= kTaskElements) {
        first_of_task_.push_back(static_cast<int64_t>(chunks_.size()));
        in_task = 0;
      }
    }
    if (numels_[slot] == 0) empty_slots_.push_back(static_cast<int64_t>(slot));
    else {
      first_element_ = numel_ ? std::min(first_element_, offsets_[slot]) : offsets_[slot];
      last_element_ = std::max(last_element_, offsets_[slot] + numels_[slot]);
    }
    numel_ += numels_[slot];
  }
  first_chunk_.push_back(static_cast<int64_t>(chunks_.size()));
  if (in_task > 0) first_of_task_.push_back(static_cast<int64_t>(chunks_.size()));
}

Layout BucketPlan::layout() const {
  return {offsets_.data(),       numels_.data(), first_chunk_.data(),
          first_of_task_.data(), chunks_.data(), static_cast<int64_t>(numels_.size()),
          static_cast<int64_t>(first_of_task_.size()) - 1,
          static_cast<int64_t>(chunks_.size()),  numel_};
}

// Order of the words: chunks, then empty slots.
int64_t BucketPlan::num_words() const {
  return static_cast<int64_t>(kChunkWords * chunks_.size() + empty_slots_.size());
}

void BucketPlan::write_words(int64_t* words) const {
  for (const Chunk& chunk : chunks_) {
    const size_t slot = static_cast<size_t>(chunk.slot);
    const DeviceChunk there{static_cast<int32_t>(slot), static_cast<int32_t>(chunk.count),
                            static_cast<int32_t>(chunk.begin / kChunkElements),
                            static_cast<int32_t>(first_chunk_[slot + 1] - first_chunk_[slot]),
                            offsets_[slot] + chunk.begin};
    std::memcpy(words, &there, sizeof(there));
    words += kChunkWords;
  }
  std::copy(empty_slots_.begin(), empty_slots_.end(), words);
}

DeviceLayout BucketPlan::layout_at(const int64_t* words) const {
  return {reinterpret_cast<const DeviceChunk*>(words), words + kChunkWords * chunks_.size(),
          static_cast<int64_t>(numels_.size()), static_cast<int64_t>(chunks_.size()),
          static_cast<int64_t>(empty_slots_.size()), numel_};
}

}  // namespace pyengine
