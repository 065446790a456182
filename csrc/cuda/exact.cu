// exact: sums of gradients that do not depend on the order of their terms. See exact.h for the rules.
#include <cmath>

#include "../exact.h"
#include "launch.cuh"
#include "sweep.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

// Neighboring threads share a block; each thread has W neighboring elements. W depends on the stored type:
// limbs of four bytes, or rounded sums.
constexpr int kLimbs = kNeighbours<int32_t>;
template <int W>
constexpr int kThreadsEach = static_cast<int>(kExactBlock) / W;

template <int W>
__device__ __forceinline__ bool is_first_of_block() { return threadIdx.x % kThreadsEach<W> == 0; }

// A thread's part of a block, as bits. It is in the engine's own memory, so it is always aligned.
template <int W>
struct Limbs {
  Packed<float, W> hi, lo;
};

__device__ __forceinline__ float* as_bits(int32_t* p) { return reinterpret_cast<float*>(p); }

template <int W>
__device__ __forceinline__ Limbs<W> load_limbs(const ExactSum& sum, int64_t i) {
  return {load_packed<W>(as_bits(sum.hi + i)), load_packed<W>(as_bits(sum.lo + i))};
}

template <int W>
__device__ __forceinline__ void store_limbs(const ExactSum& sum, int64_t i, const Limbs<W>& limbs) {
  store_packed(as_bits(sum.hi + i), limbs.hi);
  store_packed(as_bits(sum.lo + i), limbs.lo);
}

template <int W>
__device__ __forceinline__ void shift_limbs(Limbs<W>& limbs, int distance) {
  if (distance <= 0) return;
  limbs.lo = distance == 1 ? limbs.hi : Packed<float, W>{};
  limbs.hi = {};
}

// A block's bins before and after an addition. Only the block's first thread accesses the stored bin, so no
// thread reads it while another thread writes it. The new bin is the largest of the old bin and the bins that
// the block's threads have found.
struct Bins {
  int before, after;
};

template <int W>
__device__ __forceinline__ Bins agree_on_bins(int before, int found) {
  const bool is_first = is_first_of_block<W>();
  // Packing both numbers in one word halves the shuffles: the low half is the maximum; the high half is zero
  // in all threads except the first.
  unsigned word = static_cast<unsigned>(is_first && before > found ? before : found);
  if (is_first) word |= static_cast<unsigned>(before) << 16;
#pragma unroll
  for (int distance = kThreadsEach<W> / 2; distance > 0; distance /= 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, word, distance);
    const unsigned after = (word & 0xffffu) > (other & 0xffffu) ? word & 0xffffu : other & 0xffffu;
    word = ((word | other) & 0xffff0000u) | after;
  }
  return {static_cast<int>(word >> 16), static_cast<int>(word & 0xffffu)};
}

template <class Term, int W>
__device__ __forceinline__ int largest_exponent(const Packed<Term, W>& term) {
  constexpr unsigned kMagnitude = sizeof(Term) == 4 ? 0x7fffffff : 0x7fff;
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const unsigned magnitude = term.bits(i) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<int>(__float_as_uint(float_of<Term>(largest)) >> 23);
}

template <class Term, int W>
__device__ __forceinline__ void add_slices(Limbs<W>& limbs, const Packed<Term, W>& term, int bin, int width) {
  const float to_hi = inverse_of_unit(bin, width), to_lo = power_of_two(width);
  const Floats<W> x = widen(term);
#pragma unroll
  for (int i = 0; i < W; ++i) {
    const float y = x.lane[i] * to_hi, hi = rintf(y), lo = rintf((y - hi) * to_lo);
    limbs.hi.words[i] += static_cast<unsigned>(static_cast<int>(hi));
    limbs.lo.words[i] += static_cast<unsigned>(static_cast<int>(lo));
  }
}

// Adds a chunk of a term to the sum, W elements per thread at a time. Missing elements of the last block
// count as zeros, and so does a first term without a tensor.
template <bool kFirst, class Term>
struct Deposit {
  static constexpr int W = kLimbs;
  // Each thread has 64 to 96 bytes in flight before the first use.
  static constexpr int kTermBytes = W * static_cast<int>(sizeof(Term)), kLimbBytes = 2 * W * 4;
  static constexpr int kSteps = kFirst ? 64 / kTermBytes : 96 / (kTermBytes + kLimbBytes);
  static constexpr int kStep = W * kThreads, kPass = kSteps * kStep;

  ExactSum sum;
  int64_t begin;  // first element of the chunk in the flat buffer
  const Term* term;
  int count;
  bool is_aligned;

  struct Loaded {
    Packed<Term, W> term;
    Limbs<kFirst ? 0 : W> limbs;
    int bin;
  };

  __device__ __forceinline__ uint8_t* bin_at(int i) const { return global(sum.bins + (begin + i) / kExactBlock); }

  __device__ __forceinline__ Loaded load(int i) const {
    Loaded x{};
    if (is_aligned && i + W <= count) x.term = load_packed<W>(term + i, ReadOnce{});
    else x.term = load_some<W>(term + i, count - i);
    if constexpr (!kFirst) x.limbs = load_limbs<W>(sum, begin + i);
    if (!kFirst && is_first_of_block<W>()) x.bin = *bin_at(i);
    return x;
  }

  // Returns true if the term poisons the block. All threads of a warp must call this, even for blocks beyond
  // the chunk, because they shuffle bins.
  __device__ __forceinline__ bool store(int i, const Loaded& x, bool has_block) const {
    const int found = bin_of(largest_exponent(x.term), sum.width);
    const Bins bins = agree_on_bins<W>(x.bin, found);
    if (!has_block) return false;
    Limbs<W> limbs{};
    if constexpr (!kFirst) {
      limbs = x.limbs;
      shift_limbs(limbs, bins.after - bins.before);
    }
    if (has_grid(bins.after)) add_slices(limbs, x.term, bins.after, sum.width);
    store_limbs(sum, begin + i, limbs);
    if (is_first_of_block<W>()) *bin_at(i) = static_cast<uint8_t>(bins.after);
    return found == kPoisoned;
  }
};

template <bool kFirst, class Term, class Table>
__global__ void __launch_bounds__(kThreads)
exact_deposit_kernel(const __grid_constant__ DeviceLayout layout, Split split,
                     const __grid_constant__ ExactSum sum, const __grid_constant__ Table terms, uint8_t* nonfinite) {
  using Op = Deposit<kFirst, Term>;
  const Part part = split.part(layout);
  const Term* term = in_tensor<const Term>(terms, part.slot, part.in_tensor);
  if (!kFirst && !term) return;
  const int count = part.count;
  const int end = (count + kExactBlock - 1) / kExactBlock * kExactBlock;
  const Op op{sum, part.in_flat, term, term ? count : 0, misalignment(term) == 0};
  bool poisoned = false;
  for (int pass = 0; pass < end; pass += Op::kPass) {
    const int first = pass + static_cast<int>(threadIdx.x) * Op::W;
    typename Op::Loaded loaded[Op::kSteps] = {};
#pragma unroll
    for (int k = 0; k < Op::kSteps; ++k)
      if (first + k * Op::kStep < end) loaded[k] = op.load(first + k * Op::kStep);
#pragma unroll
    for (int k = 0; k < Op::kSteps; ++k)
      poisoned |= op.store(first + k * Op::kStep, loaded[k], first + k * Op::kStep < end);
  }
  if (poisoned) raise_flag(nonfinite + part.slot);
}

// Each thread updates the bin of one block; then neighboring threads shift the limbs of blocks whose bin has
// grown. In most calls, no bin grows.
__global__ void __launch_bounds__(kThreads)
exact_align_kernel(const __grid_constant__ ExactSum sum, const uint8_t* bins) {
  constexpr int W = kLimbs;
  __shared__ int distances[kThreads];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads, block = first + threadIdx.x;
  int distance = 0;
  if (block < sum.num_blocks) {
    const int before = sum.bins[block], after = bins[block];
    distance = after > before ? after - before : 0;
    if (distance > 0) sum.bins[block] = static_cast<uint8_t>(after);
  }
  distances[threadIdx.x] = distance;
  if (!__syncthreads_or(distance > 0)) return;
  for (int i = threadIdx.x * W; i < kThreads * kExactBlock; i += kThreads * W) {
    const int shift = distances[i / kExactBlock];
    if (shift == 0) continue;
    const int64_t at = first * kExactBlock + i;
    Limbs<W> limbs{};
    if (shift == 1) limbs.hi = load_packed<W>(as_bits(sum.hi + at));
    shift_limbs(limbs, shift);
    store_limbs(sum, at, limbs);
  }
}

template <class Out, int W>
__device__ __forceinline__ Packed<Out, W> round_limbs(const Limbs<W>& limbs, int bin, int width) {
  constexpr Rounding kRounding = __is_same(Out, float) ? Rounding::nearest : Rounding::odd;
  Floats<W> x;
#pragma unroll
  for (int i = 0; i < W; ++i)
    x.lane[i] = pyengine::round_limbs<kRounding>(static_cast<int32_t>(limbs.hi.words[i]),
                                                 static_cast<int32_t>(limbs.lo.words[i]), width);
  return narrow<Out>(x * unit_of_sum(bin, width));
}

// Number of elements that a CTA rounds, with 64 bytes of limbs per thread in flight.
constexpr int kRoundBytes = 64, kRoundElements = kThreads * kRoundBytes / (2 * sizeof(int32_t));

// In-place rounding is safe, because each element belongs to one thread, which reads it before writing it.
template <class Out>
__global__ void __launch_bounds__(kThreads)
exact_round_kernel(const __grid_constant__ ExactSum sum, Out* out) {
  constexpr int W = kNeighbours<Out>, kStep = W * kThreads, kUnroll = kRoundElements / kStep;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRoundElements + threadIdx.x * W;
  const int64_t end = sum.num_blocks * kExactBlock;
  Limbs<W> limbs[kUnroll];
  int bins[kUnroll];
#pragma unroll
  for (int k = 0; k < kUnroll; ++k)
    if (first + k * kStep < end) {
      limbs[k] = load_limbs<W>(sum, first + k * kStep);
      bins[k] = *global(sum.bins + (first + k * kStep) / kExactBlock);
    }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k)
    if (first + k * kStep < end) {
      const Packed<Out, W> rounded = round_limbs<Out>(limbs[k], bins[k], sum.width);
      if (misalignment(out) == 0) store_packed(out + first + k * kStep, rounded);
      else store_some(out + first + k * kStep, rounded, W);
    }
}

// ---- dispatch ----

template <bool kFirst, class Term>
void deposit_typed(const DeviceLayout& layout, void* stream, const DepositCall& call) {
  const Split split(layout, Deposit<kFirst, Term>::kPass);
  with_table(call.terms, layout.num_slots, [&](const auto& terms) {
    launch<exact_deposit_kernel<kFirst, Term, Bare<decltype(terms)>>>(
        "exact_deposit_", split.num_parts(layout), kThreads, stream, layout, split, call.sum, terms, call.nonfinite);
  });
}

int64_t ctas_for(int64_t n, int64_t each) { return (n + each - 1) / each; }

}  // namespace

// ---- entry points ----

void exact_deposit_cuda(const DeviceLayout& layout, void* stream, const DepositCall& call) {
  if (layout.num_chunks == 0) return;
  with_type(call.terms.dtype, [&](auto term_t) {
    using Term = decltype(term_t);
    if (call.first) deposit_typed<true, Term>(layout, stream, call);
    else deposit_typed<false, Term>(layout, stream, call);
  });
}

void exact_align_cuda(const DeviceLayout&, void* stream, const AlignCall& call) {
  if (call.sum.num_blocks == 0) return;
  launch<exact_align_kernel>("exact_align_", ctas_for(call.sum.num_blocks, kThreads), kThreads, stream, call.sum,
                             call.bins);
}

void exact_round_cuda(const DeviceLayout&, void* stream, const RoundCall& call) {
  if (call.sum.num_blocks == 0) return;
  const int64_t ctas = ctas_for(call.sum.num_blocks * kExactBlock, kRoundElements);
  with_type(call.out.dtype, [&](auto out_t) {
    using Out = decltype(out_t);
    launch<exact_round_kernel<Out>>("exact_round_", ctas, kThreads, stream, call.sum, as<Out>(call.out.data));
  });
}

}  // namespace pyengine
