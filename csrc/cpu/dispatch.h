// The ops as one table per instruction set, chosen at run time.
#pragma once
#include "../calls.h"
#include "../plan.h"

namespace pyengine {

#define PYENGINE_OPS(isa)                                                                       \
  namespace isa {                                                                               \
  void pack_cpu(const Layout&, const Flat& flat, const Tensors& tensors, const float* scale);   \
  void unpack_cpu(const Layout&, const Tensors& tensors, const Flat& flat, const float* scale); \
  void accumulate_cpu(const Layout&, const AccumulateCall&);                                    \
  void accumulate_cast_cpu(const Layout&, const AccumulateCastCall&);                           \
  void unscale_norm_cpu(const Layout&, const UnscaleNormCall&);                                 \
  void exact_deposit_cpu(const Layout&, const DepositCall&);                                    \
  void exact_align_cpu(const AlignCall&);                                                       \
  void exact_round_cpu(const RoundCall&);                                                       \
  float roof_read(const float* src, int64_t numel);                                             \
  void roof_update(float* dst, int64_t numel);                                                  \
  void roof_stream_copy(float* dst, const float* src, int64_t numel);                           \
  }
PYENGINE_OPS(generic)
PYENGINE_OPS(avx2)
PYENGINE_OPS(avx512)
#undef PYENGINE_OPS

struct Ops {
  const char* isa;
  decltype(&generic::pack_cpu) pack;
  decltype(&generic::unpack_cpu) unpack;
  decltype(&generic::accumulate_cpu) accumulate;
  decltype(&generic::accumulate_cast_cpu) accumulate_cast;
  decltype(&generic::unscale_norm_cpu) unscale_norm;
  decltype(&generic::exact_deposit_cpu) exact_deposit;
  decltype(&generic::exact_align_cpu) exact_align;
  decltype(&generic::exact_round_cpu) exact_round;
  decltype(&generic::roof_read) roof_read;
  decltype(&generic::roof_update) roof_update;
  decltype(&generic::roof_stream_copy) roof_stream_copy;
};

// The table in force: the best this machine runs, or the one set_isa chose.
const Ops& ops();

// "generic", "avx2", "avx512" or "auto"; false when this machine or build lacks it.
bool set_isa(const char* name);

}  // namespace pyengine
