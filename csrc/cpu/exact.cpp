// exact: sums of gradients that do not depend on the order of their terms. See exact.h for the rules.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

constexpr int64_t kVectors = kExactBlock / kLanes;

// One block of a sum.
struct Block {
  int32_t *hi, *lo;
  uint8_t* bin;
};

Block block_of(const ExactSum& sum, int64_t index) {
  return {sum.hi + index * kExactBlock, sum.lo + index * kExactBlock, sum.bins + index};
}

template <class Access>
PYENGINE_INLINE inline void clear(const Block& sum, Access access) {
  for (int64_t i = 0; i < kExactBlock; i += kLanes) access.store(sum.hi + i, zero_ints());
  for (int64_t i = 0; i < kExactBlock; i += kLanes) access.store(sum.lo + i, zero_ints());
}

// Rarely called: a window's bins seldom grow after its first terms. Poisoned blocks get zero limbs; otherwise
// their limbs would depend on the order of the terms.
void raise_bin(const Block& sum, int bin) {
  constexpr int64_t kBytes = kExactBlock * sizeof(int32_t);
  if (bin == *sum.bin + 1) std::memcpy(sum.lo, sum.hi, kBytes);
  else std::memset(sum.lo, 0, kBytes);
  std::memset(sum.hi, 0, kBytes);
  *sum.bin = static_cast<uint8_t>(bin);
}

// Adds the slices of a term to the sum, or stores them if it is the first term. Streamed lines are written
// one after another, so each limb has its own loop.
template <bool kFirst, class Access>
PYENGINE_INLINE inline void add_slices(const Block& sum, const F32x16 (&x)[kVectors], int width, Access access) {
  const F32x16 to_hi = splat(inverse_of_unit(*sum.bin, width)), to_lo = splat(power_of_two(width));
  I32x16 lo[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) {
    const F32x16 y = mul(x[v], to_hi);
    I32x16 hi = round_even(y);
    lo[v] = round_even(mul(sub(y, to_floats(hi)), to_lo));
    if constexpr (!kFirst) hi = add(load_ints(sum.hi + v * kLanes), hi);
    access.store(sum.hi + v * kLanes, hi);
  }
  for (int64_t v = 0; v < kVectors; ++v) {
    if constexpr (!kFirst) lo[v] = add(load_ints(sum.lo + v * kLanes), lo[v]);
    access.store(sum.lo + v * kLanes, lo[v]);
  }
}

PYENGINE_INLINE inline void prefetch_block(Full, const void*, int64_t) {}
PYENGINE_INLINE inline void prefetch_block(Streamed, const void* p, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) prefetch(static_cast<const char*>(p) + kPrefetchBytes + i);
}

// The largest biased exponent of a block.
template <class Term, class Access>
PYENGINE_INLINE inline int largest_exponent(const Term* term, Access access) {
  prefetch_block(access, term, kExactBlock * sizeof(Term));
  Largest<Term> largest;
  for (int64_t i = 0; i < kExactBlock; i += kLanes) largest.see(load_packed(term + i));
  return largest.exponent();
}

// Adds one block of a term; `bin` is the bin of this block.
template <bool kFirst, class Term, class Access>
PYENGINE_INLINE inline void deposit_block(const Block& sum, const Term* term, int bin, int width, Access access) {
  if constexpr (kFirst) {
    *sum.bin = static_cast<uint8_t>(bin);
    if (!has_grid(bin)) return clear(sum, access);
  } else {
    if (bin > *sum.bin) raise_bin(sum, bin);
    if (!has_grid(bin) || *sum.bin == kPoisoned) return;
  }
  F32x16 x[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) x[v] = widen(load_packed(term + v * kLanes));
  add_slices<kFirst>(sum, x, width, access);
}

// A block's slices depend on its largest element, and finding that element is the longest dependency chain.
// So find the largest elements of a few blocks before the first of them is needed. The second read of a block
// hits the L1 cache.
constexpr int64_t kGroup = 4;

// Adds at most kGroup blocks of a term; returns true if the term poisons one of them.
template <bool kFirst, class Term, class Access>
PYENGINE_INLINE inline bool deposit_group(const ExactSum& sum, int64_t first, const Term* term, int64_t num_blocks,
                                          Access access) {
  int bins[kGroup], largest = 0;
  for (int64_t b = 0; b < num_blocks; ++b) {
    bins[b] = bin_of(largest_exponent(term + b * kExactBlock, access), sum.width);
    largest = bins[b] > largest ? bins[b] : largest;
  }
  for (int64_t b = 0; b < num_blocks; ++b)
    deposit_block<kFirst>(block_of(sum, first + b), term + b * kExactBlock, bins[b], sum.width, access);
  return largest == kPoisoned;
}

// Calls step(block, num_blocks, access) for [0, n) in groups, either at two places at once (see step_full) or
// with streaming stores.
template <class Step>
PYENGINE_INLINE inline void step_groups(int64_t n, bool streaming, const Step& step) {
  const int64_t half = streaming ? 0 : n / (2 * kGroup) * kGroup, whole = n / kGroup * kGroup;
  for (int64_t b = 0; b < half; b += kGroup) {
    step(b, kGroup, Full{});
    step(b + half, kGroup, Full{});
  }
  if (streaming)
    for (int64_t b = 0; b < whole; b += kGroup) step(b, kGroup, Streamed{});
  else if (2 * half < whole)
    step(2 * half, kGroup, Full{});
  if (whole < n) step(whole, n - whole, Full{});
}

// Adds a chunk of a term to the sum, starting at block `first`. Missing elements of the last block are zeros.
template <bool kFirst, class Term>
bool deposit_kernel(ExactSum sum, int64_t first, const Term* term, int64_t n, bool streaming) {
  bool poisoned = false;
  const int64_t whole = n / kExactBlock, rest = n % kExactBlock;
  step_groups(whole, streaming, [&](int64_t b, int64_t num_blocks, auto access) PYENGINE_INLINE {
    poisoned |= deposit_group<kFirst>(sum, first + b, term + b * kExactBlock, num_blocks, access);
  });
  if (rest == 0) return poisoned;
  alignas(64) Term last[kExactBlock] = {};
  std::memcpy(last, term + whole * kExactBlock, rest * sizeof(Term));
  return poisoned | deposit_group<kFirst>(sum, first + whole, last, 1, Full{});
}

void clear_kernel(ExactSum sum, int64_t first, int64_t num_blocks, bool streaming) {
  std::memset(sum.bins + first, kEmpty, num_blocks);
  step_groups(num_blocks, streaming, [&](int64_t group, int64_t n, auto access) PYENGINE_INLINE {
    for (int64_t b = group; b < group + n; ++b) clear(block_of(sum, first + b), access);
  });
}

template <class Out, class Access>
PYENGINE_INLINE inline void round_block(Out* out, const Block& sum, int width, Access access) {
  constexpr Rounding kRounding = __is_same(Out, float) ? Rounding::nearest : Rounding::odd;
  const F32x16 unit = splat(unit_of_sum(*sum.bin, width));
  for (int64_t i = 0; i < kExactBlock; i += kLanes) {
    const F32x16 x = round_limbs<kRounding>(load_ints(sum.hi + i), load_ints(sum.lo + i), width);
    access.store(out + i, pack<Out>(mul(x, unit)));
  }
}

template <class Out>
void round_kernel(ExactSum sum, Out* out, int64_t begin, int64_t end, bool streaming) {
  step_groups(end - begin, streaming, [&](int64_t group, int64_t n, auto access) PYENGINE_INLINE {
    for (int64_t b = begin + group; b < begin + group + n; ++b)
      round_block(out + b * kExactBlock, block_of(sum, b), sum.width, access);
  });
}

// ---- dispatch ----

// Streaming stores need full cache lines.
bool is_aligned(const void* p) { return reinterpret_cast<uint64_t>(p) % 64 == 0; }

template <class Term>
void deposit_typed(const Layout& layout, const DepositCall& call) {
  const ExactSum& sum = call.sum;
  const bool streaming =
      call.first && worth_streaming<int64_t>(layout) && is_aligned(sum.hi) && is_aligned(sum.lo);
  for_each_chunk(layout, [&](const Chunk& chunk) {
    const Term* term = in_tensor<const Term>(call.terms, chunk);
    const int64_t first = (layout.offsets[chunk.slot] + chunk.begin) / kExactBlock;
    bool poisoned = false;
    if (!term) {
      if (call.first) clear_kernel(sum, first, (chunk.count + kExactBlock - 1) / kExactBlock, streaming);
    } else if (call.first) {
      poisoned = deposit_kernel<true>(sum, first, term, chunk.count, streaming);
    } else {
      poisoned = deposit_kernel<false>(sum, first, term, chunk.count, false);
    }
    if (poisoned) raise_flag(call.nonfinite + chunk.slot);
  });
}

constexpr int64_t kTaskBlocks = kTaskElements / kExactBlock;

template <class Out>
void round_typed(const RoundCall& call) {
  Out* out = as<Out>(call.out.data);
  // In place, the lines are already in the cache, and streaming stores would evict them.
  const bool is_large = call.sum.num_blocks * kExactBlock * static_cast<int64_t>(sizeof(Out)) >= kStreamBytes;
  const bool streaming = is_large && is_aligned(out) && call.out.data != call.sum.hi;
  for_each_range(call.sum.num_blocks, kTaskBlocks, [&](int64_t begin, int64_t end) {
    round_kernel(call.sum, out, begin, end, streaming);
  });
}

}  // namespace

// ---- entry points ----

void exact_deposit_cpu(const Layout& layout, const DepositCall& call) {
  with_type(call.terms.dtype, [&](auto term_t) { deposit_typed<decltype(term_t)>(layout, call); });
}

void exact_align_cpu(const Layout&, const AlignCall& call) {
  for_each_range(call.sum.num_blocks, kTaskBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      if (call.bins[b] > call.sum.bins[b]) raise_bin(block_of(call.sum, b), call.bins[b]);
  });
}

void exact_round_cpu(const Layout&, const RoundCall& call) {
  with_type(call.out.dtype, [&](auto out_t) { round_typed<decltype(out_t)>(call); });
}

}  // namespace pyengine::PYENGINE_ISA
