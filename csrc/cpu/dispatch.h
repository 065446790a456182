// The ops as one table per instruction set, chosen at run time.
#pragma once
#include "../calls.h"
#include "../plan.h"
#include "../shared_kind.h"

// The instruction sets, best first; a build for one machine alone has one of them. A further one is a name here, its
// runs_<name> in dispatch.cpp, a simd_<name>.h and a line in CMakeLists.txt.
#ifdef PYENGINE_X86
#define PYENGINE_LEVELS(LEVEL) LEVEL(avx512) LEVEL(avx2) LEVEL(generic)
#else
#define PYENGINE_LEVELS(LEVEL) LEVEL(generic)
#endif

namespace pyengine {

// What words are weighed by in a checksum, block by block: pyengine/audit/checksum.py.
struct WordWeights {
  const int32_t* weights;
  int64_t block;
};

// Elements start, start + stride, ... of what lies at `from`, times `weight`: written to `last` and added to `sum`, which
// may be null.
struct SampleCall {
  const void* from;
  DType dtype;
  int64_t start, stride, num;
  float weight;
  float *sum, *last;
};

#define PYENGINE_OP(op, Call) void op##_cpu(const Layout& layout, const Call& call);
#define PYENGINE_LEVEL(isa)                                           \
  namespace isa {                                                     \
  PYENGINE_OPS(PYENGINE_OP)                                           \
  float roof_read(const float* src, int64_t numel);                   \
  void roof_update(float* dst, int64_t numel);                        \
  void roof_stream_copy(float* dst, const float* src, int64_t numel); \
  int64_t checksum(const int32_t* words, int64_t n, const WordWeights& rule); \
  void sample(const SampleCall& call);                                \
  void shared_sum(const SharedSum& call);                             \
  }
PYENGINE_LEVELS(PYENGINE_LEVEL)
#undef PYENGINE_LEVEL
#undef PYENGINE_OP

struct Ops {
  const char* isa;
#define PYENGINE_OP(op, Call) void (*op)(const Layout& layout, const Call& call);
  PYENGINE_OPS(PYENGINE_OP)
#undef PYENGINE_OP
  float (*roof_read)(const float* src, int64_t numel);
  void (*roof_update)(float* dst, int64_t numel);
  void (*roof_stream_copy)(float* dst, const float* src, int64_t numel);
  int64_t (*checksum)(const int32_t* words, int64_t n, const WordWeights& rule);
  void (*sample)(const SampleCall& call);
  void (*shared_sum)(const SharedSum& call);
};

// Whether this machine runs any instruction set of this build: without, there is no table.
bool has_ops();

// The table in force: the best this machine runs, or the one set_isa chose.
const Ops& ops();

// The name of a set, or "auto"; false when this machine or build lacks it.
bool set_isa(const char* name);

}  // namespace pyengine
