// One table of all ops per instruction set; the table is chosen at run time.
#pragma once
#include "../calls.h"
#include "../plan.h"
#include "../shared_kind.h"

// The instruction sets, best first; a build for one machine has only one. To add a set, add its name
// here, runs_<name> in dispatch.cpp, simd_<name>.h, and a line in CMakeLists.txt.
#ifdef PYENGINE_X86
#define PYENGINE_LEVELS(LEVEL) LEVEL(avx512) LEVEL(avx2) LEVEL(generic)
#else
#define PYENGINE_LEVELS(LEVEL) LEVEL(generic)
#endif

namespace pyengine {

// The weights of words in a checksum, block by block; see pyengine/audit/checksum.py.
struct WordWeights {
  const int32_t* weights;
  int64_t block;
};

// Elements start, start + stride, ... of `from` are multiplied by `weight`, written to `last`, and added to
// `sum`, which may be null.
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

// Whether this machine can run any instruction set of this build; otherwise there is no table.
bool has_ops();

// The current table: the best table that this machine can run, or the table that set_isa chose.
const Ops& ops();

// Sets the instruction set by name, or "auto"; returns false when this machine or build lacks it.
bool set_isa(const char* name);

}  // namespace pyengine
