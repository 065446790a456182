#include "plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pyengine {

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
    if (numels_[slot] > 0) {
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

// Order: offsets, first_chunk, chunks.
int64_t BucketPlan::num_words() const {
  return static_cast<int64_t>(offsets_.size() + first_chunk_.size() + 3 * chunks_.size());
}

void BucketPlan::write_words(int64_t* words) const {
  words = std::copy(offsets_.begin(), offsets_.end(), words);
  words = std::copy(first_chunk_.begin(), first_chunk_.end(), words);
  if (!chunks_.empty()) std::memcpy(words, chunks_.data(), chunks_.size() * sizeof(Chunk));
}

Layout BucketPlan::layout_at(const int64_t* words) const {
  Layout there = layout();
  there.offsets = words;
  there.first_chunk = words + offsets_.size();
  there.chunks = reinterpret_cast<const Chunk*>(there.first_chunk + first_chunk_.size());
  there.numels = there.first_of_task = nullptr;
  return there;
}

}  // namespace pyengine
