// Whether what an op writes shares memory with anything else that it touches: threads overtake each other, so it would
// read what is already overwritten. False asks Python for a closer look and for the words (pyengine/ops/overlap.py).
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

// The memory of a list's tensors by address, the empty ones left out.
std::vector<Span> sorted_spans(const BucketPlan& plan, const Tensors& tensors);

bool is_disjoint(const std::vector<Span>& sorted);

// A tensor may lie outside of all slots, or exactly in its own: element by element in place.
bool flat_is_apart(const BucketPlan& plan, const Flat& flat, const Tensors& tensors);

// The same for two lists of which the first is written.
bool lists_are_apart(const std::vector<Span>& out, const std::vector<Span>& tensors, bool same_dtype);

bool is_outside(const BucketPlan& plan, const Tensors& tensors, uintptr_t begin, uintptr_t end);

}  // namespace pyengine
