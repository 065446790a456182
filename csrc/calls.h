// The ops and their arguments, the same on the CPU and on CUDA: addresses and dtypes, which Python has checked.
#pragma once
#include <cstdint>

#include "codec.h"
#include "dtype.h"
#include "exact.h"

namespace pyengine {

// One pointer per slot; null means no tensor.
struct Tensors {
  void* const* data;  // in host memory
  DType dtype;
  void* const* on_device = nullptr;  // a copy of data in CUDA memory; null: the kernels' parameters carry data
};

struct Flat {
  void* data;
  DType dtype;
};

struct PackCall {  // also of unpack
  Flat flat;
  Tensors tensors;
  const float* scale;
  const float* only_if = nullptr;  // write nothing where this is 0; null: always write
};

struct AccumulateCall {
  float* acc;
  Tensors grads;
  const float* scale;
  bool first;
  uint8_t* nonfinite;  // [num_slots]
};

struct AccumulateCastCall {
  Flat wire;
  const float* acc;
  Tensors grads;
  const float *grad_scale, *wire_scale;
  bool first;
  uint8_t* nonfinite;  // [num_slots]
};

struct UnscaleNormCall {
  Tensors tensors;
  Tensors out;  // out.data is null: read only
  const float* scale;
  double* partials;    // scratch: one per block
  double* sumsq;       // [num_slots]
  uint8_t* nonfinite;  // [num_slots]
  uint32_t* tickets = nullptr;  // [num_slots] scratch of CUDA: zero before and after
};

struct DepositCall {
  ExactSum sum;
  Tensors terms;
  bool first;
  uint8_t* nonfinite;  // [num_slots]
};

struct AlignCall {
  ExactSum sum;
  const uint8_t* bins;  // [sum.num_blocks]
};

struct RoundCall {
  ExactSum sum;
  Flat out;
};

// The next three ops have no layout of slots: they iterate over a payload.
struct EncodeCall {
  Codec codec;
  uint8_t* payload;
  const float* values;  // [codec.numel]
  float* residual;      // [codec.numel] or null
  Chance chance;
};

struct SumEncodeCall {
  Codec codec;
  uint8_t* out;
  Payloads payloads;
  float* residual;  // [codec.numel] or null
  Chance chance;
};

struct SumCall {
  Codec codec;
  Flat out;  // [codec.numel]
  Payloads payloads;
};

// Every op: <op>_cpu(layout, call) in csrc/cpu, <op>_cuda(layout, stream, call) in csrc/cuda.
#define PYENGINE_OPS(OP)                  \
  OP(pack, PackCall)                      \
  OP(unpack, PackCall)                    \
  OP(accumulate, AccumulateCall)          \
  OP(accumulate_cast, AccumulateCastCall) \
  OP(unscale_norm, UnscaleNormCall)       \
  OP(exact_deposit, DepositCall)          \
  OP(exact_align, AlignCall)              \
  OP(exact_round, RoundCall)              \
  OP(codec_encode, EncodeCall)            \
  OP(codec_sum_encode, SumEncodeCall)     \
  OP(codec_sum, SumCall)

}  // namespace pyengine
