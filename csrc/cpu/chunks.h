// Iterates over a layout: over its chunks on all threads, and over one chunk in steps of sixteen.
#pragma once
#include "../plan.h"
#include "../torch_shim.h"
#include "dispatch.h"
#include "simd.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// Ordinary stores read every line before they overwrite it. Non-temporal stores do not, and they bypass the
// caches. They are faster when the destination would not stay in the cache anyway.
constexpr int64_t kStreamBytes = 8 << 20;

template <class T>
bool worth_streaming(const Layout& layout) {
  return layout.numel * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
}

template <class T>
T* as(void* p) { return static_cast<T*>(p); }

// Pointers to the chunk's first element in its tensor and in the flat buffer. Null tensors stay null.
template <class T>
T* in_tensor(const Tensors& tensors, const Chunk& chunk) {
  T* data = as<T>(tensors.data[chunk.slot]);
  return data ? data + chunk.begin : nullptr;
}
template <class T>
T* in_flat(T* flat, const Layout& layout, const Chunk& chunk) {
  return flat + layout.offsets[chunk.slot] + chunk.begin;
}

// Calls body(begin, end) on ranges of tasks, on torch's threads.
template <class Body>
void for_each_task(int64_t num_tasks, const Body& body) {
  auto run = [](int64_t begin, int64_t end, void* p) {
    (*static_cast<const Body*>(p))(begin, end);
    stream_fence();  // streamed stores become visible before the threads join
  };
  parallel_for(num_tasks, run, const_cast<Body*>(&body));
}

// Calls body(chunk) for every chunk.
template <class Body>
void for_each_chunk(const Layout& layout, const Body& body) {
  for_each_task(layout.num_tasks, [&](int64_t begin, int64_t end) {
    const Chunk* last = layout.chunks + layout.first_of_task[end];
    for (const Chunk* chunk = layout.chunks + layout.first_of_task[begin]; chunk != last; ++chunk) body(*chunk);
  });
}

// Calls body(begin, end) on ranges of n blocks, with `each` blocks per task.
template <class Body>
void for_each_range(int64_t n, int64_t each, const Body& body) {
  for_each_task((n + each - 1) / each, [&](int64_t begin, int64_t end) {
    body(begin * each, end * each < n ? end * each : n);
  });
}

// Steps must be inlined: a call would keep their captures (scale, sums, flags) in memory instead of
// registers, because a store through an element pointer might change them.
#define PYENGINE_INLINE __attribute__((always_inline))

// Steps over full groups of sixteen in [begin, end) and returns where it stopped. It iterates over two halves
// at once, because the hardware prefetcher stops at every page, and the second stream keeps memory busy
// meanwhile (reads are 20-30% faster).
template <class Step>
PYENGINE_INLINE inline int64_t step_full(int64_t begin, int64_t end, const Step& step) {
  const int64_t half = (end - begin) / (2 * kLanes) * kLanes;
  int64_t i = begin;
  for (; i < begin + half; i += kLanes) {
    step(i, Full{});
    step(i + half, Full{});
  }
  for (i += half; i + kLanes <= end; i += kLanes) step(i, Full{});
  return i;
}

// Streaming stores collect in a few line buffers of the core, so use only one stream; otherwise half-filled
// lines are flushed.
template <class Step>
PYENGINE_INLINE inline int64_t step_streamed(int64_t begin, int64_t end, const Step& step) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) step(i, Streamed{});
  return i;
}

// Calls step(i, access) over [0, n) in groups of sixteen. The step stores to `dst`. Streaming needs an
// aligned `dst`, so a short step up to the boundary comes first.
template <class Dst, class Step>
PYENGINE_INLINE inline void sweep(const Dst* dst, int64_t n, bool streaming, const Step& step) {
  constexpr uint64_t kAlign = kLanes * sizeof(Dst);
  const uint64_t address = reinterpret_cast<uint64_t>(dst);
  int64_t i = 0;
  if (streaming && address % sizeof(Dst) == 0) {
    const int64_t head = static_cast<int64_t>((kAlign - address % kAlign) % kAlign / sizeof(Dst));
    if (head > 0) {
      i = head < n ? head : n;
      step(0, Some{i});
    }
    i = step_streamed(i, n, step);
  } else {
    i = step_full(0, n, step);
  }
  if (i < n) step(i, Some{n - i});
}

// The chunks of a slot share a flag, and may run on different threads.
inline void raise_flag(uint8_t* flag) { __atomic_fetch_or(flag, uint8_t{1}, __ATOMIC_RELAXED); }

}  // namespace
}  // namespace pyengine::PYENGINE_ISA
