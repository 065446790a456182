// Iteration of a CTA over a chunk or a part of it, shared by the elementwise ops.
#pragma once
#include <cstdint>
#include <utility>

#include "../plan.h"
#include "packed.cuh"

namespace pyengine {
namespace {

// CTAs of 256 threads are small enough that an SM holds several chunks at once, so that one chunk's last
// stores overlap the next chunk's loads.
constexpr int kThreads = 256;

// Number of groups of N neighbors that a thread loads before it stores the first group: 64 to 128 bytes. An
// SM then holds 1024 threads or more, with at least 64 KiB of loads in flight; bandwidth × latency is 30 to
// 45 KiB per SM on sm_90 and sm_100.
template <int N, class Loaded>
constexpr int kUnroll = sizeof(Loaded) > 32 ? 2 : N > 1 && sizeof(Loaded) >= 8 && sizeof(Loaded) < 16 ? 8 : 4;
template <int N, class Op>
using Loaded = decltype(std::declval<Op&>().template load<N>(0));

// Calls op on elements at(0), at(1), ... at(n - 1), N neighbors per step. All loads of a pass precede its
// stores, which is correct in place because each element belongs to one thread.
template <int N, class Op, class At>
__device__ __forceinline__ void rounds(Op& op, int n, At at) {
  constexpr int kSteps = kUnroll<N, Loaded<N, Op>>;
  for (int first = threadIdx.x; first < n; first += kSteps * kThreads) {
    Loaded<N, Op> loaded[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (first + k * kThreads < n) loaded[k] = op.template load<N>(at(first + k * kThreads));
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (first + k * kThreads < n) op.store(at(first + k * kThreads), loaded[k]);
  }
}

constexpr unsigned kAlign = 16;  // bytes of the widest access

template <unsigned kBytes = kAlign, class T>
__device__ __forceinline__ unsigned misalignment(const T* p) {
  return static_cast<unsigned>(reinterpret_cast<uint64_t>(p)) % kBytes;
}

// Number of elements before the next address that is aligned to kBytes.
template <unsigned kBytes, class T>
__device__ __forceinline__ int to_boundary(const T* p) {
  return static_cast<int>((kBytes - misalignment<kBytes>(p)) % kBytes / sizeof(T));
}

template <class... Ints>
__device__ __forceinline__ int largest(int found, Ints... others) {
  ((found = others > found ? others : found), ...);
  return found;
}

// Number of neighboring elements that one thread handles at a time: as many as fill one 16-byte store. Stores
// that fill only half of a sector need a second pass through L2 (on an H200, adding a bf16 gradient to an
// fp32 sum reached 78% of the copy rate with two 16-byte stores per thread, and 92% with one). Loads of 8
// bytes have no extra cost.
template <class Stored>
constexpr int kNeighbours = kAlign / sizeof(Stored);
// Number of elements that a CTA handles in one pass of an op that stores this type.
template <class Op, class Stored>
constexpr int kPass = kUnroll<kNeighbours<Stored>, Loaded<kNeighbours<Stored>, Op>> * kThreads * kNeighbours<Stored>;

// The part of a chunk that one CTA handles; the part is empty if `count` is below 1.
struct Part {
  int slot, count;
  int64_t in_tensor, in_flat;  // its first element
};

// Splits every chunk into 2^bits parts of equal length: enough for one pass per CTA, or fewer if chunks are
// short on average. With more passes, a CTA's loads wait for its stores: on an H200, exact_deposit_ then
// reached 78% of the copy rate instead of 95%.
struct Split {
  int bits;

  Split(const DeviceLayout& layout, int pass) : bits(0) {
    while (layout.numel >> bits > pass * layout.num_chunks) ++bits;
  }
  int64_t num_parts(const DeviceLayout& layout) const { return layout.num_chunks << bits; }

  __device__ __forceinline__ Part part(const DeviceLayout& layout) const {
    const DeviceChunk chunk = layout.chunks[blockIdx.x >> bits];
    const int most = static_cast<int>(kChunkElements) >> bits;
    const int begin = static_cast<int>(blockIdx.x & ((1u << bits) - 1)) * most, left = chunk.count - begin;
    return {chunk.slot, left < most ? left : most, chunk.index * kChunkElements + begin, chunk.in_flat + begin};
  }
};

// Size in bytes of one access to N elements of type T.
template <class T, int N>
constexpr unsigned kAccess = N * sizeof(T) < kAlign ? N * sizeof(T) : kAlign;

// Calls op over [0, count) of a chunk; op reads `loaded` and writes `stored`. If all arrays have the same
// alignment phase, the body is accessed in vectors, and the few elements before and after it one by one.
// Otherwise all elements are accessed one by one, with neighboring elements on neighboring threads.
template <class Op, class Stored, class... Loaded>
__device__ __forceinline__ void sweep(Op& op, int count, const Stored* stored, const Loaded*... loaded) {
  constexpr int kWidth = kNeighbours<Stored>;
  const int head = largest(to_boundary<kAccess<Stored, kWidth>>(stored), to_boundary<kAccess<Loaded, kWidth>>(loaded)...);
  const bool in_phase = misalignment<kAccess<Stored, kWidth>>(stored + head) == 0 &&
                        ((misalignment<kAccess<Loaded, kWidth>>(loaded + head) == 0) && ...) && head < count;
  const int vectors = in_phase ? (count - head) / kWidth : 0;
  rounds<kWidth>(op, vectors, [=](int i) { return head + i * kWidth; });
  rounds<1>(op, count - vectors * kWidth, [=](int i) { return i < head ? i : i + vectors * kWidth; });
}

// An op that writes zeros.
template <class T>
struct Zeros {
  T* data;
  template <int N> struct Loaded {};

  template <int N>
  __device__ __forceinline__ Loaded<N> load(int) const { return {}; }
  template <int N>
  __device__ __forceinline__ void store(int i, Loaded<N>) const { store_packed(data + i, Packed<T, N>{}); }
};

template <class T>
__device__ __forceinline__ void fill_zeros(T* data, int count) {
  Zeros<T> op{data};
  sweep(op, count, data);
}

}  // namespace
}  // namespace pyengine
