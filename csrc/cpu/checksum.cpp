// A checksum of words that knows where each of them lies: pyengine/audit/checksum.py defines it. All of it is
// arithmetic of integers that wrap, so the order of the sums is no matter.
#include <algorithm>
#include <atomic>

#include "../torch_shim.h"
#include "dispatch.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// Lanes that are summed at once: their sums stay in the first-level cache while the blocks' runs stream past.
constexpr int64_t kTile = 4096;

uint64_t weighed(const int32_t* words, const int32_t* weights, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<uint64_t>(static_cast<int64_t>(words[i]) * weights[i]);
  return sum;
}

// Adds to lanes [begin, end) what every block has there; block b begins at lane b % num_shifts * shift.
void add_blocks(uint32_t* lanes, int64_t begin, int64_t end, const int32_t* words, int64_t n, const LaneRule& rule) {
  for (int64_t block = 0; block * rule.block < n; ++block) {
    const int64_t first = block % rule.num_shifts * rule.shift, start = block * rule.block;
    const int64_t from = std::max(begin, first), to = std::min(end, first + std::min(rule.block, n - start));
    const uint32_t factor = 2 * static_cast<uint32_t>(block) + 1;
    const int32_t* run = words + start;
    for (int64_t lane = from; lane < to; ++lane)
      lanes[lane - begin] += factor * static_cast<uint32_t>(run[lane - first]);
  }
}

uint64_t tile(int64_t begin, const int32_t* words, int64_t n, const LaneRule& rule) {
  alignas(64) uint32_t lanes[kTile] = {};
  const int64_t end = std::min(begin + kTile, rule.num_rows * rule.row);
  add_blocks(lanes, begin, end, words, n, rule);
  uint64_t sum = 0;
  for (int64_t at = begin; at < end;) {  // a row has its own factor
    const int64_t row = at / rule.row, stop = std::min(end, (row + 1) * rule.row);
    const auto* sums = reinterpret_cast<const int32_t*>(lanes + (at - begin));
    sum += (2 * static_cast<uint64_t>(row) + 1) * weighed(sums, rule.weights + at % rule.row, stop - at);
    at = stop;
  }
  return sum;
}

}  // namespace

int64_t checksum(const int32_t* words, int64_t n, const LaneRule& rule) {
  if (n <= rule.row) return static_cast<int64_t>(weighed(words, rule.weights, n));
  struct Context { const int32_t* words; int64_t n; const LaneRule& rule; std::atomic<uint64_t> sum; };
  Context context{words, n, rule, {0}};
  const int64_t num_lanes = rule.num_rows * rule.row;
  auto run = [](int64_t first, int64_t last, void* p) {
    Context& c = *static_cast<Context*>(p);
    for (int64_t i = first; i < last; ++i) c.sum += tile(i * kTile, c.words, c.n, c.rule);
  };
  parallel_for((num_lanes + kTile - 1) / kTile, run, &context);
  return static_cast<int64_t>(context.sum.load());
}

}  // namespace pyengine::PYENGINE_ISA
