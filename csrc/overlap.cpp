#include "overlap.h"

#include <algorithm>

namespace pyengine {
namespace {

// Calls fn(slot, begin, end) for every tensor that has elements, until fn returns false.
template <class Fn>
bool all_spans(const BucketPlan& plan, const Tensors& tensors, const Fn& fn) {
  const std::vector<int64_t>& numels = plan.numels();
  const int64_t size = element_bytes(tensors.dtype);
  for (size_t i = 0; i < numels.size(); ++i) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(tensors.data[i]);
    if (begin && numels[i] && !fn(i, begin, begin + static_cast<uintptr_t>(size * numels[i]))) return false;
  }
  return true;
}

}  // namespace

std::vector<Span> sorted_spans(const BucketPlan& plan, const Tensors& tensors) {
  std::vector<Span> spans;
  spans.reserve(plan.numels().size());
  all_spans(plan, tensors, [&](size_t slot, uintptr_t begin, uintptr_t end) {
    spans.push_back({begin, end, static_cast<int64_t>(slot)});
    return true;
  });
  const auto by_begin = [](const Span& a, const Span& b) { return a.begin < b.begin; };
  if (!std::is_sorted(spans.begin(), spans.end(), by_begin)) std::sort(spans.begin(), spans.end(), by_begin);
  return spans;
}

bool is_disjoint(const std::vector<Span>& sorted) {
  for (size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i].begin < sorted[i - 1].end) return false;
  return true;
}

bool flat_is_apart(const BucketPlan& plan, const Flat& flat, const Tensors& tensors) {
  const auto at = [&](int64_t element) {
    return reinterpret_cast<uintptr_t>(flat.data) + static_cast<uintptr_t>(element_bytes(flat.dtype) * element);
  };
  const uintptr_t first = at(plan.first_element()), last = at(plan.last_element());
  const bool same_dtype = flat.dtype == tensors.dtype;
  return all_spans(plan, tensors, [&](size_t slot, uintptr_t begin, uintptr_t end) {
    if (end <= first || begin >= last) return true;
    return same_dtype && begin == at(plan.offsets()[slot]);
  });
}

bool lists_are_apart(const std::vector<Span>& out, const std::vector<Span>& tensors, bool same_dtype) {
  size_t next = 0;
  for (const Span& read : tensors) {
    while (next < out.size() && out[next].end <= read.begin) ++next;
    for (size_t i = next; i < out.size() && out[i].begin < read.end; ++i)
      if (!same_dtype || out[i].slot != read.slot || out[i].begin != read.begin) return false;
  }
  return true;
}

bool is_outside(const BucketPlan& plan, const Tensors& tensors, uintptr_t first, uintptr_t last) {
  return all_spans(plan, tensors, [&](size_t, uintptr_t begin, uintptr_t end) { return end <= first || begin >= last; });
}

}  // namespace pyengine
