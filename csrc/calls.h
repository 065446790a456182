// The ops and their arguments (addresses and dtypes that Python has checked), which are the same on CPU and
// CUDA.
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
  void* const* on_device = nullptr;  // copy of `data` in CUDA memory; null: pass `data` as kernel parameters
};

struct Flat {
  void* data;
  DType dtype;
};

struct PackCall {  // also used by unpack
  Flat flat;
  Tensors tensors;
  const float* scale;
  const float* only_if = nullptr;  // if the value is 0, nothing is written; null: always write
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
  Tensors out;  // for the scaled values; if out.data is null, they are not stored
  const float* scale;
  double* partials;    // scratch: one number per block
  double* sumsq;       // [num_slots]
  uint8_t* nonfinite;  // [num_slots]
  uint32_t* tickets = nullptr;  // [num_slots] CUDA scratch: zero before and after the call
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

// The next three ops have no slot layout; they iterate over a payload.
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

// Every op has two functions, <op>_cpu(layout, call) in csrc/cpu and <op>_cuda(layout, stream, call) in
// csrc/cuda.
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
