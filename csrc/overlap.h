// Whether an op's output shares memory with its other tensors. Threads overtake each other, so the op would read memory
// that it has overwritten. On false, Python checks one by one and writes the message (pyengine/ops/overlap.py).
#pragma once
#include <cstdint>
#include <vector>

#include "calls.h"
#include "plan.h"

namespace pyengine {

struct Span {
  uintptr_t begin, end;
  int64_t slot;
};

// The memory of a list's non-empty tensors, by address.
std::vector<Span> sorted_spans(const BucketPlan& plan, const Tensors& tensors);

bool is_disjoint(const std::vector<Span>& sorted);

// A tensor may be outside of all slots, or exactly in its own slot: element by element in place.
bool flat_is_apart(const BucketPlan& plan, const Flat& flat, const Tensors& tensors);

// The same for two lists, of which the first is written.
bool lists_are_apart(const std::vector<Span>& out, const std::vector<Span>& tensors, bool same_dtype);

bool is_outside(const BucketPlan& plan, const Tensors& tensors, uintptr_t begin, uintptr_t end);

}  // namespace pyengine
