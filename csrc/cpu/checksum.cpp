// A checksum that depends on the position of each word, defined in pyengine/audit/checksum.py. All arithmetic
// is on integers that wrap, so the order of the sums does not matter.
#include <algorithm>
#include <atomic>

#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

uint64_t weighed(const int32_t* words, const int32_t* weights, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<uint64_t>(static_cast<int64_t>(words[i]) * weights[i]);
  return sum;
}

// The factor of a block: odd, and with well-mixed bits.
uint64_t factor_of(int64_t block) {
  uint64_t mixed = static_cast<uint64_t>(block);
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u + 0x9E3779B97F4A7C15u;
  return (mixed ^ mixed >> 27) | 1;
}

}  // namespace

int64_t checksum(const int32_t* words, int64_t n, const WordWeights& rule) {
  std::atomic<uint64_t> total{0};
  for_each_task((n + rule.block - 1) / rule.block, [&](int64_t first, int64_t last) {
    uint64_t sum = 0;
    for (int64_t block = first; block < last; ++block) {
      const int64_t start = block * rule.block, num = std::min(rule.block, n - start);
      sum += factor_of(block) * weighed(words + start, rule.weights, num);
    }
    total += sum;
  });
  return static_cast<int64_t>(total.load());
}

}  // namespace pyengine::PYENGINE_ISA
