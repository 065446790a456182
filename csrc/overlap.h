// Checks whether an op's output overlaps its other tensors. Threads run in no fixed order, so the op could
// read memory that it has already overwritten. If a check returns false, Python checks the tensors one by one
// and writes the error message (pyengine/ops/overlap.py).
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

// Memory ranges of a list's non-empty tensors, sorted by address.
std::vector<Span> sorted_spans(const BucketPlan& plan, const Tensors& tensors);

bool is_disjoint(const std::vector<Span>& sorted);

// A tensor may lie outside all slots, or exactly in its own slot (elementwise in place).
bool flat_is_apart(const BucketPlan& plan, const Flat& flat, const Tensors& tensors);

// The same check for two lists, of which the first is written.
bool lists_are_apart(const std::vector<Span>& out, const std::vector<Span>& tensors, bool same_dtype);

bool is_outside(const BucketPlan& plan, const Tensors& tensors, uintptr_t begin, uintptr_t end);

}  // namespace pyengine
