// unscale_norm: y = x·scale, its sum of squares, and a check for nonfinite values, in one pass. Writing y is
// optional.
#include <cmath>
#include <type_traits>

#include "launch.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

struct Nothing {};  // the output type of a pass that only reads

constexpr int kLanes = kSumLanes, kRows = kSegmentElements / kSumLanes, kSegments = kChunkElements / kSegmentElements;

// Number of neighboring lanes of a segment that one thread sums: as many as fill a 16-byte store, or a
// 16-byte load if nothing is stored (see sweep.cuh). A CTA handles one chunk in one pass.
template <class Out, class In>
constexpr int kWidth = 16 / (__is_same(Out, Nothing) ? sizeof(In) : sizeof(Out));
template <class Out, class In>
constexpr int kThreads = kSegments * kLanes / kWidth<Out, In>;

// Stride in doubles from one segment to the next in shared memory: an odd stride keeps writers and readers on
// separate banks.
constexpr int kPitch = kLanes + 1;

// Adds y² of W neighboring elements, or of the first n, to their lanes, and returns y as it is stored.
// Missing elements are skipped, because zero times an infinite scale is NaN. The square is exact in double,
// so fma and mul + add give the same bits.
template <bool kWhole, class Out, class In, int W>
__device__ __forceinline__ auto add_squares(double (&sums)[W], const Packed<In, W>& x, int n, float scale) {
  using Stored = std::conditional_t<__is_same(Out, Nothing), float, Out>;
  const Packed<Stored, W> stored = narrow<Stored>(widen(x) * scale);
  const Floats<W> y = widen(stored);
#pragma unroll
  for (int i = 0; i < W; ++i)
    if (kWhole || i < n) sums[i] = fma(static_cast<double>(y.lane[i]), static_cast<double>(y.lane[i]), sums[i]);
  return stored;
}

// Sums a thread's lanes over the rows of one segment. `in` and `out` point to the thread's part of the first
// row. From there, the slot has `left` more elements (fewer than one if the segment is beyond the slot's
// end).
template <class Out, class In, int W>
__device__ __forceinline__ void sum_rows(double (&sums)[W], Out* out, const In* in, int left, float scale) {
  // Each thread has 64 bytes in flight before the first use, or 128 if fp32 is cast; with W = 1, it loads a
  // whole segment.
  constexpr int kAhead = W == 1 ? kRows : W * sizeof(In) == 8 ? 8 : 4;
  const int rows = left < W ? 0 : left - W >= (kRows - 1) * kLanes ? kRows : (left - W) / kLanes + 1;
  for (int row = 0; row < rows; row += kAhead) {
    Packed<In, W> x[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (row + k < rows) x[k] = load_packed<W>(in + (row + k) * kLanes);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (row + k < rows) {
        const auto y = add_squares<true, Out>(sums, x[k], W, scale);
        if constexpr (!__is_same(Out, Nothing)) store_packed(out + (row + k) * kLanes, y);
      }
  }
  const int tail = rows * kLanes;
  if (W > 1 && rows < kRows && tail < left) {
    const auto y = add_squares<false, Out>(sums, load_some<W>(in + tail, left - tail), left - tail, scale);
    if constexpr (!__is_same(Out, Nothing)) store_some(out + tail, y, left - tail);
  }
}

// A row of two-byte elements is a quarter of an L2 line, but takes as long to load as a whole line. So eight
// threads, which have four segments, load lines of four rows and exchange rows through shared memory.
template <class Out, class In>
constexpr bool kHasLines = sizeof(In) == 2 && kWidth<Out, In> == 8;
constexpr int kWarpElements = 16 * static_cast<int>(kSegmentElements);

// Like sum_rows, for a warp whose segments are whole and start at `in` and `out`.
template <class Out, class In>
__device__ __forceinline__ void sum_lines(double (&sums)[8], uint4* shared, Out* out, const In* in, float scale) {
  constexpr int kSegment = static_cast<int>(kSegmentElements);
  const int half = threadIdx.x % 2, own = threadIdx.x / 2 % 4;
  const int first = threadIdx.x % 32 / 8 * 4 * kSegment + own * kLanes + half * 8;
  in += first;
  if constexpr (!__is_same(Out, Nothing)) out += first;
  uint4* rows = shared + threadIdx.x / 8 * 32 + half;
  // Address of a row of one of the four segments. The order of rows keeps the eight threads on separate
  // banks.
  const auto at = [=](int segment, int row) { return rows + (segment * 4 + (row ^ segment)) * 2; };
#pragma unroll 1
  for (int row = 0; row < kRows; row += 4, in += 4 * kLanes) {
    Packed<In, 8> x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = load_packed<8>(in + k * kSegment);
#pragma unroll
    for (int k = 0; k < 4; ++k) *at(k, own) = uint4{x[k].words[0], x[k].words[1], x[k].words[2], x[k].words[3]};
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 q = *at(own, k);
      const auto y = add_squares<true, Out>(sums, Packed<In, 8>{{q.x, q.y, q.z, q.w}}, 8, scale);
      if constexpr (!__is_same(Out, Nothing)) *at(own, k) = uint4{y.words[0], y.words[1], y.words[2], y.words[3]};
    }
    __syncwarp();
    if constexpr (!__is_same(Out, Nothing)) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 q = *at(k, own);
        store_packed(out + row * kLanes + k * kSegment, Packed<Out, 8>{{q.x, q.y, q.z, q.w}});
      }
    }
  }
}

// Sums the chunk's segments and writes their lanes to shared memory.
template <int W, int kNumThreads, class Out, class In>
__device__ __forceinline__ void sum_segments(double* shared, uint4* rows, Out* out, const In* in, int count,
                                             float scale) {
  constexpr int kThreadsEach = kLanes / W;
  const int lane = threadIdx.x % kThreadsEach * W;
  for (int segment = threadIdx.x / kThreadsEach; segment < kSegments; segment += kNumThreads / kThreadsEach) {
    const int first = segment * static_cast<int>(kSegmentElements) + lane;
    double sums[W] = {};
    if constexpr (W == 8 && kHasLines<Out, In>) {
      const int of_warp = threadIdx.x / 32 * kWarpElements;
      if (count - of_warp >= kWarpElements) sum_lines(sums, rows, out + of_warp, in + of_warp, scale);
      else sum_rows(sums, out + first, in + first, count - first, scale);
    } else {
      sum_rows(sums, out + first, in + first, count - first, scale);
    }
#pragma unroll
    for (int i = 0; i < W; ++i) shared[segment * kPitch + lane + i] = sums[i];
  }
}

// If the data is not aligned, a thread handles one lane at a time, so that neighboring lanes stay on
// neighboring threads.
template <int W, int kNumThreads, class Out, class In>
__device__ __forceinline__ void sum_chunk(double* shared, uint4* rows, Out* out, const In* in, int count, float scale) {
  if ((reinterpret_cast<uint64_t>(in) | reinterpret_cast<uint64_t>(out)) % 16 != 0) {
    sum_segments<1, kNumThreads>(shared, rows, out, in, count, scale);
  } else {
    sum_segments<W, kNumThreads>(shared, rows, out, in, count, scale);
  }
}

// Called by one warp, with one half for each block of the chunk. Adds segments in order, then lanes by
// halves. The first lane of each half returns the sum.
__device__ __forceinline__ double sum_blocks(const double* shared) {
  constexpr int kBlockSegments = kBlockElements / kSegmentElements;
  const int block = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  double sum = 0;
#pragma unroll 8
  for (int segment = 0; segment < kBlockSegments; ++segment)
    sum += shared[(block * kBlockSegments + segment) * kPitch + lane];
#pragma unroll
  for (int width = kLanes / 2; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width);
  return sum;
}

// Counts a finished chunk of a slot with `num_chunks` chunks; returns true in the slot's last CTA. Only the
// last CTA needs the second fence, because no other CTA reads partials of other CTAs.
__device__ __forceinline__ bool is_last(unsigned* ticket, int num_chunks) {
  __syncthreads();  // this CTA's partials are written
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();  // make the partials visible before the ticket
    last = atomicAdd(ticket, 1u) + 1 == static_cast<unsigned>(num_chunks);
    if (last) {
      __threadfence();  // read the other CTAs' partials after the ticket
      *ticket = 0;
    }
  }
  return __syncthreads_or(last);
}

// Block b is added to block lane b % 256, in order; then the block lanes are added by halves.
template <int kNumThreads>
__device__ __forceinline__ double sum_slot(double* shared, const double* partials, int64_t num_blocks) {
  for (int lane = threadIdx.x; lane < kBlockLanes; lane += kNumThreads) {
    double sum = 0;
#pragma unroll 8
    for (int64_t block = lane; block < num_blocks; block += kBlockLanes) sum += partials[block];
    shared[lane] = sum;
  }
  for (unsigned width = kBlockLanes / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) shared[threadIdx.x] += shared[threadIdx.x + width];
  }
  return shared[0];  // complete in thread 0, which added last
}

// Destination of the sums.
struct Sums {
  double *partials, *sumsq;
  unsigned* tickets;
  uint8_t* nonfinite;
};

__device__ __forceinline__ void write_sum(const Sums& sums, int slot, double sum) {
  sums.sumsq[slot] = sum;
  // The square of a finite float cannot overflow a double, so the sum is finite exactly when the slot is.
  if (sum - sum != 0) raise_flag(sums.nonfinite + slot);
}

// Adds up the segments in shared memory; the last CTA of a slot also adds the sums of the other CTAs.
template <int kNumThreads>
__device__ __forceinline__ void sum_rest(double* shared, const DeviceChunk& chunk, const Sums& sums) {
  double* own = sums.partials + 2 * static_cast<int64_t>(blockIdx.x);
  if (threadIdx.x < 2 * kLanes) {
    const double block = sum_blocks(shared);
    if (chunk.num_chunks > 1) {
      if (threadIdx.x % kLanes == 0) own[threadIdx.x / kLanes] = block;
    } else {
      // The common case: the same result as sum_slot for two blocks, of which the second may be empty.
      const double sum = block + __shfl_down_sync(0xffffffffu, block, kLanes);
      if (threadIdx.x == 0) write_sum(sums, chunk.slot, sum);
    }
  }
  if (chunk.num_chunks == 1 || !is_last(sums.tickets + chunk.slot, chunk.num_chunks)) return;
  const double* partials = own - 2 * static_cast<int64_t>(chunk.index);
  const double sum = sum_slot<kNumThreads>(shared, partials, 2 * static_cast<int64_t>(chunk.num_chunks));
  if (threadIdx.x == 0) write_sum(sums, chunk.slot, sum);
}

__device__ __forceinline__ void zero_empty_slots(const DeviceLayout& layout, double* sumsq, int threads) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * threads;
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; i < layout.num_empty; i += step)
    sumsq[layout.empty_slots[i]] = 0;
}

// Used instead of a second table: `NoTable` if nothing is written, `InPlace` if the list is written in place.
struct NoTable {};
struct InPlace {};

template <class T, class Table>
__device__ __forceinline__ T* in_chunk(const Table& tensors, const DeviceChunk& chunk) {
  return in_tensor<T>(tensors, chunk.slot, chunk.index * kChunkElements);
}

template <class Out, class Table, class OutTable>
__device__ __forceinline__ Out* find_out(const Table& tensors, const OutTable& outs, const DeviceChunk& chunk) {
  if constexpr (__is_same(OutTable, NoTable)) return nullptr;
  else if constexpr (__is_same(OutTable, InPlace)) return in_chunk<Out>(tensors, chunk);
  else return in_chunk<Out>(outs, chunk);
}

// Minimum number of CTAs per SM; 0 lets ptxas decide. With sum_lines, ptxas would use 138 registers per
// thread.
template <class Out, class In>
constexpr int kMinCtas = kHasLines<Out, In> ? 7 : 0;

template <class Out, class In, class Table, class OutTable>
__global__ void __launch_bounds__(kThreads<Out, In>, kMinCtas<Out, In>)
unscale_norm_kernel(const __grid_constant__ DeviceLayout layout, const __grid_constant__ Table tensors,
                    const __grid_constant__ OutTable outs, const float* scale, const __grid_constant__ Sums sums) {
  constexpr int kNumThreads = kThreads<Out, In>, W = kWidth<Out, In>;
  __shared__ double shared[kSegments * kPitch];
  __shared__ uint4 rows[kHasLines<Out, In> ? 4 * kNumThreads : 1];
  if (blockIdx.x < layout.num_chunks) {
    const DeviceChunk chunk = layout.chunks[blockIdx.x];
    const In* in = in_chunk<const In>(tensors, chunk);
    Out* out = find_out<Out>(tensors, outs, chunk);
    const int count = in ? chunk.count : 0;
    if (__is_same(OutTable, InPlace) || out) sum_chunk<W, kNumThreads>(shared, rows, out, in, count, *scale);
    else sum_chunk<W, kNumThreads, Nothing>(shared, rows, nullptr, in, count, *scale);
    __syncthreads();
    sum_rest<kNumThreads>(shared, chunk, sums);
  }
  zero_empty_slots(layout, sums.sumsq, kNumThreads);  // last, so that no load of data waits for it
}

// ---- dispatch ----

template <class Out, class In, class Table, class OutTable>
void launch_unscale_norm(const DeviceLayout& layout, void* stream, const UnscaleNormCall& call, const Table& tensors,
                         const OutTable& outs) {
  const int64_t ctas = layout.num_chunks > 0 ? layout.num_chunks : 1;  // at least one, for empty slots
  launch<unscale_norm_kernel<Out, In, Table, OutTable>>(
      "unscale_norm", ctas, kThreads<Out, In>, stream, layout, tensors, outs, call.scale,
      Sums{call.partials, call.sumsq, call.tickets, call.nonfinite});
}

// For one list, which is only read or is written in place.
template <class Out, class In, class OutTable>
void unscale_norm_of_one(const DeviceLayout& layout, void* stream, const UnscaleNormCall& call, const OutTable& outs) {
  with_table(call.tensors, layout.num_slots, [&](const auto& tensors) {
    launch_unscale_norm<Out, In>(layout, stream, call, tensors, outs);
  });
}

}  // namespace

// ---- entry points ----

void unscale_norm_cuda(const DeviceLayout& layout, void* stream, const UnscaleNormCall& call) {
  if (layout.num_slots == 0) return;
  with_type(call.tensors.dtype, [&](auto in_t) {
    using In = decltype(in_t);
    if (!call.out.data) return unscale_norm_of_one<Nothing, In>(layout, stream, call, NoTable{});
    if (call.out.data == call.tensors.data) return unscale_norm_of_one<In, In>(layout, stream, call, InPlace{});
    with_type(call.out.dtype, [&](auto out_t) {
      launch_unscale_norm<decltype(out_t), In>(layout, stream, call,
                                               SlotTable<kInlineSlots>(call.tensors, layout.num_slots),
                                               SlotTable<kInlineSlots>(call.out, layout.num_slots));
    });
  });
}

}  // namespace pyengine
