// A checksum that depends on the position of each word, defined in pyengine/audit/checksum.py. All arithmetic is on
// integers that wrap, so the order of the sums does not matter.
#include <algorithm>
#include <atomic>

#include "../torch_shim.h"
#include "dispatch.h"

namespace pyengine::PYENGINE_ISA {
namespace {

uint64_t weighed(const int32_t* words, const int32_t* weights, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<uint64_t>(static_cast<int64_t>(words[i]) * weights[i]);
  return sum;
}

// The factor of a block: odd, and without pattern in its bits.
uint64_t factor_of(int64_t block) {
  uint64_t mixed = static_cast<uint64_t>(block);
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u + 0x9E3779B97F4A7C15u;
  return (mixed ^ mixed >> 27) | 1;
}

}  // namespace

int64_t checksum(const int32_t* words, int64_t n, const WordWeights& rule) {
  struct Context { const int32_t* words; int64_t n; const WordWeights& rule; std::atomic<uint64_t> sum; };
  Context context{words, n, rule, {0}};
  auto run = [](int64_t first, int64_t last, void* p) {
    Context& c = *static_cast<Context*>(p);
    uint64_t sum = 0;
    for (int64_t block = first; block < last; ++block) {
      const int64_t start = block * c.rule.block, num = std::min(c.rule.block, c.n - start);
      sum += factor_of(block) * weighed(c.words + start, c.rule.weights, num);
    }
    c.sum += sum;
  };
  parallel_for((n + rule.block - 1) / rule.block, run, &context);
  return static_cast<int64_t>(context.sum.load());
}

}  // namespace pyengine::PYENGINE_ISA
