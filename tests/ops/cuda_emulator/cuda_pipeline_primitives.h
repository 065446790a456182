// Copies from global to shared memory that a thread waits for. Here they are made when it does, and no earlier: a
// kernel that forgets to wait reads what was there before.
#pragma once
#include <map>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
inline std::map<unsigned, std::vector<Copy>> on_their_way;  // by thread of the block

}  // namespace emulator

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  emulator::check_aligned(to, bytes);
  emulator::check_aligned(from, bytes);
  emulator::on_their_way[threadIdx.x].push_back({to, from, bytes});
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(size_t) {
  for (const emulator::Copy& copy : emulator::on_their_way[threadIdx.x]) std::memcpy(copy.to, copy.from, copy.bytes);
  emulator::on_their_way[threadIdx.x].clear();
}
