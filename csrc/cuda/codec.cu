// codec: values in one or two bytes each, with a scale a block, and sums of them. codec.h has the rules.
#include "../codec.h"
#include "codes.cuh"
#include "launch.cuh"
#include "sweep.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

// Neighbouring threads share a block, which they keep in registers between its scale and its codes. In each of kSteps
// runs of a block a thread has four neighbouring elements.
constexpr int kWarp = 32;

// The position of a thread's elements. kWhole: all elements of its CTA exist, which takes a third of the instructions.
template <int kRuns, bool kWhole>
struct Spot {
  static constexpr int kSteps = kRuns;
  int lanes, lane;  // number of threads of its block, and this thread's index
  int64_t block;
  int64_t begin;  // first element of its first run
  int left;       // number of existing elements from begin on, at most kMostBlock; none where it is not positive

  __device__ __forceinline__ explicit Spot(const Codec& codec)
      : lanes(lanes_of(codec)),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        block(static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes),
        begin(block * codec.block + lane * kEach) {
    const int64_t all = codec.numel - begin;
    left = static_cast<int>(all < kMostBlock ? all : kMostBlock);
  }

  __device__ __forceinline__ static int lanes_of(const Codec& codec) {
    return kSteps > 1 ? kWarp : static_cast<int>(codec.block) / kEach;
  }
  __device__ __forceinline__ int step(int k) const { return k * lanes * kEach; }
  __device__ __forceinline__ int64_t at(int k) const { return begin + step(k); }
  // Number of existing elements from at(k) on; none where it is not positive. (Clamped to 0 to kEach, ptxas 13.0 takes
  // the comparison with kEach from the wrong predicate on sm_90.)
  __device__ __forceinline__ int count(int k) const { return kWhole ? kEach : left - step(k); }
  __device__ __forceinline__ bool is_whole(int k) const { return count(k) >= kEach; }
  __device__ __forceinline__ bool exists() const { return kWhole || left > 0; }
};

// Calls fn with the position of this thread's elements.
template <int kSteps, class Fn>
__device__ __forceinline__ void at_spot(const Codec& codec, const Fn& fn) {
  const int64_t blocks = kThreads / Spot<kSteps, false>::lanes_of(codec);
  if ((static_cast<int64_t>(blockIdx.x) + 1) * blocks * codec.block <= codec.numel) fn(Spot<kSteps, true>(codec));
  else fn(Spot<kSteps, false>(codec));
}

template <int kSteps>
struct Values {
  Floats<kEach> run[kSteps];
};

// Missing elements read as zero. A thread's elements have the alignment of the first one of all.
template <class Spot>
__device__ __forceinline__ Floats<kEach> load_floats(const Spot& spot, int k, const float* p) {
  if (spot.is_whole(k) && misalignment(p) == 0) return widen(load_packed<kEach>(p + spot.at(k)));
  return widen(load_some<kEach>(p + spot.at(k), spot.count(k)));
}

template <class Spot>
__device__ __forceinline__ void store_floats(const Spot& spot, int k, float* p, const Floats<kEach>& x) {
  const Packed<float, kEach> packed = narrow<float>(x);
  if (spot.is_whole(k) && misalignment(p) == 0) store_packed(p + spot.at(k), packed);
  else store_some(p + spot.at(k), packed, spot.count(k));
}

template <class Spot>
__device__ __forceinline__ Values<Spot::kSteps> load_values(const Spot& spot, const float* p) {
  Values<Spot::kSteps> x;
#pragma unroll
  for (int k = 0; k < Spot::kSteps; ++k) x.run[k] = load_floats(spot, k, p);
  return x;
}

// From the codes of this thread's first run on.
template <class Spot, class Code>
__device__ __forceinline__ Quad<Code> load_quad(const Spot& spot, int k, const Code* codes) {
  Quad<Code> quad{};
  const Code* p = codes + spot.step(k);
  const int count = spot.count(k);
  if constexpr (sizeof(Code) == 1) {
    if (count > 0) quad.words[0] = *reinterpret_cast<const unsigned*>(global(p));
  } else if (spot.is_whole(k) && misalignment(codes) % 4 == 0) {
    const unsigned* words = reinterpret_cast<const unsigned*>(global(p));
    quad.words[0] = words[0], quad.words[1] = words[1];
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i < count) quad.set(i, p[i]);
  }
  return quad;
}

template <class Spot, class Code>
__device__ __forceinline__ void store_quad(const Spot& spot, int k, Code* codes, const Quad<Code>& quad) {
  Code* p = codes + spot.at(k);
  const int count = spot.count(k);
  if constexpr (sizeof(Code) == 1) {
    if (count > 0) *reinterpret_cast<unsigned*>(global(p)) = quad.words[0];
  } else if (spot.is_whole(k) && misalignment(codes) % 4 == 0) {
    unsigned* words = reinterpret_cast<unsigned*>(global(p));
    words[0] = quad.words[0], words[1] = quad.words[1];
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i < count) p[i] = static_cast<Code>(quad.code(i));
  }
}

// The scales and the codes of a payload.
template <class Format>
struct Parts {
  float* scales;
  typename Format::Code* codes;

  __device__ __forceinline__ Parts(const Codec& codec, const uint8_t* payload)
      : scales(reinterpret_cast<float*>(const_cast<uint8_t*>(payload))),
        codes(reinterpret_cast<typename Format::Code*>(const_cast<uint8_t*>(payload) + codec.scale_bytes())) {}
};

// ---- encoding ----

// The largest of a number over the threads of a block. All threads of a warp run this, also those without a block.
template <class Spot>
__device__ __forceinline__ unsigned largest_of_block(const Spot& spot, unsigned mine) {
  if constexpr (Spot::kSteps > 1) {  // of a warp
    return __reduce_max_sync(0xffffffffu, mine);
  } else {
    for (int distance = spot.lanes / 2; distance > 0; distance /= 2) {
      const unsigned other = __shfl_xor_sync(0xffffffffu, mine, distance);
      mine = other > mine ? other : mine;
    }
    return mine;
  }
}

template <class Spot, class Weight>
__device__ __forceinline__ unsigned largest_weight(const Spot& spot, const Values<Spot::kSteps>& x, Weight weight) {
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < Spot::kSteps; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const unsigned other = weight(as_bits(x.run[k].lane[i]));
      largest = other > largest ? other : largest;
    }
  return largest_of_block(spot, largest);
}

struct Scaling {
  float scale = 1, inverse = 1;
  bool is_finite = true;  // whether all values of the block are
};

template <class Format, class Spot>
__device__ __forceinline__ Scaling agree_on_scale(const Spot& spot, const Values<Spot::kSteps>& x) {
  unsigned largest = largest_weight(spot, x, [](unsigned bits) { return bits & kMagnitude; });
  const bool is_finite = largest < kFloatInfinity;
  // Rare, so that the check costs nothing: values that are not finite do not count.
  if (__any_sync(0xffffffffu, !is_finite)) largest = largest_weight(spot, x, weight_of);
  const float scale = scale_of<Format>(largest);
  return {scale, inverse_of(scale), is_finite};
}

// Codes of values that are not finite, where Four has those of others.
template <class Format>
__device__ __forceinline__ void encode_nonfinite(const Floats<kEach>& x, Quad<typename Format::Code>& codes) {
  const Quad<typename Format::Code> others = codes;
  codes = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint32_t bits = as_bits(x.lane[i]);
    const bool is_finite = (bits & kMagnitude) < kFloatInfinity;
    codes.set(i, is_finite ? others.code(i) : Format::template code<false>(bits, bits, 0));
  }
}

// Errors of coded values: 0 where a value or what its code means is not finite.
template <class Format>
__device__ __forceinline__ Floats<kEach> errors_of(const Floats<kEach>& x, const Quad<typename Format::Code>& codes,
                                                   const Scaling& by) {
  Floats<kEach> errors = Four<Format>::decode(codes);
  if constexpr (kHasScale<Format>) errors = errors * by.scale;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    errors.lane[i] = error_of(x.lane[i], errors.lane[i]);
    if (!by.is_finite && (as_bits(x.lane[i]) & kMagnitude) >= kFloatInfinity) errors.lane[i] = 0;
  }
  return errors;
}

template <class Format, bool kStochastic, class Spot>
__device__ __forceinline__ void encode_block(const Spot& spot, const Values<Spot::kSteps>& x, const Parts<Format>& to,
                                             float* residual, bool adds, const Chance& chance) {
  Scaling by;
  if constexpr (kHasScale<Format>) {
    by = agree_on_scale<Format>(spot, x);
    if (spot.lane == 0 && spot.exists()) *global(to.scales + spot.block) = by.scale;
  }
#pragma unroll
  for (int k = 0; k < Spot::kSteps; ++k) {
    const Floats<kEach>& values = x.run[k];
    const Floats<kEach> scaled = kHasScale<Format> ? values * by.inverse : values;
    const auto element = static_cast<uint32_t>(spot.at(k));
    Quad<typename Format::Code> codes = Four<Format>::template encode<kStochastic>(values, scaled, chance, element);
    if (!by.is_finite) encode_nonfinite<Format>(values, codes);
    store_quad(spot, k, to.codes, codes);
    if (!residual) continue;
    const Floats<kEach> errors = errors_of<Format>(values, codes, by);
    store_floats(spot, k, residual, adds ? load_floats(spot, k, residual) + errors : errors);
  }
}

template <class Format, int kSteps, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
codec_encode_kernel(const __grid_constant__ EncodeCall call) {
  at_spot<kSteps>(call.codec, [&](const auto& spot) {
    Values<kSteps> x = load_values(spot, call.values);
    if (call.residual) {
      const Values<kSteps> more = load_values(spot, call.residual);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) x.run[k] = x.run[k] + more.run[k];
    }
    const Parts<Format> to(call.codec, call.payload);
    encode_block<Format, kStochastic>(spot, x, to, call.residual, false, call.chance);
  });
}

// ---- sums ----

// The codes of one rank before they are added, so that several loads are in flight at once.
template <class Format, int kSteps>
struct Sent {
  Quad<typename Format::Code> run[kSteps];
  float scale;
};

template <class Format, class Spot>
__device__ __forceinline__ Values<Spot::kSteps> sum_block(const Spot& spot, const Codec& codec,
                                                          const Payloads& payloads) {
  using Code = typename Format::Code;
  constexpr int kSteps = Spot::kSteps;
  constexpr int kAhead = kSteps < 8 ? 8 / kSteps : 1;
  Values<kSteps> sum;
  typename Four<Format>::Nans nans[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) sum.run[k] = {{-0.0f, -0.0f, -0.0f, -0.0f}};  // plus x is x, also for -0
  const uint8_t* scale = payloads.data + spot.block * sizeof(float);
  const uint8_t* codes = payloads.data + codec.scale_bytes() + spot.begin * sizeof(Code);
  const int num_ranks = static_cast<int>(payloads.num_ranks);
  for (int rank = 0; rank < num_ranks; rank += kAhead) {
    Sent<Format, kSteps> sent[kAhead];
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (rank + r >= num_ranks) continue;
      sent[r] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) sent[r].run[k] = load_quad(spot, k, reinterpret_cast<const Code*>(codes));
      if (kHasScale<Format> && spot.exists()) sent[r].scale = *global(reinterpret_cast<const float*>(scale));
      scale += payloads.stride, codes += payloads.stride;
    }
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (rank + r >= num_ranks) continue;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        nans[k].see(sent[r].run[k]);
        const Floats<kEach> values = Four<Format>::decode(sent[r].run[k]);
        sum.run[k] = sum.run[k] + (kHasScale<Format> ? values * sent[r].scale : values);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) nans[k].put_into(sum.run[k]);
  return sum;
}

template <class Format, int kSteps, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
codec_sum_encode_kernel(const __grid_constant__ SumEncodeCall call) {
  at_spot<kSteps>(call.codec, [&](const auto& spot) {
    Values<kSteps> sum = sum_block<Format>(spot, call.codec, call.payloads);
    // The padding of the last word may have any value in the input; here it is zero.
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (i >= spot.count(k)) sum.run[k].lane[i] = 0;
    const Parts<Format> to(call.codec, call.out);
    encode_block<Format, kStochastic>(spot, sum, to, call.residual, true, call.chance);
  });
}

template <class Format, int kSteps, class Out>
__global__ void __launch_bounds__(kThreads)
codec_sum_kernel(const __grid_constant__ Codec codec, const __grid_constant__ Payloads payloads, Out* out) {
  at_spot<kSteps>(codec, [&](const auto& spot) {
    const Values<kSteps> sum = sum_block<Format>(spot, codec, payloads);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (__is_same(Out, float)) {
        store_floats(spot, k, out, sum.run[k]);
      } else {
        const Packed<Out, kEach> narrowed = narrow<Out>(sum.run[k]);
        store_quad(spot, k, reinterpret_cast<uint16_t*>(out), Quad<uint16_t>{narrowed.words[0], narrowed.words[1]});
      }
    }
  });
}

// ---- dispatch ----

// Formats without scales are processed in blocks, too.
Codec walked(Codec codec) {
  if (codec.block == 1) codec.block = 2 * kWarp * kEach;
  return codec;
}

template <int kValue>
using Number = std::integral_constant<int, kValue>;

// Calls fn with the number of runs of a block that a thread has.
template <class Format, class Fn>
void with_steps(const Codec& codec, const Fn& fn) {
  if constexpr (!kHasScale<Format>) {
    fn(Number<2>{});
  } else {
    switch (codec.block / (kWarp * kEach)) {
      case 8: return fn(Number<8>{});
      case 4: return fn(Number<4>{});
      case 2: return fn(Number<2>{});
      default: return fn(Number<1>{});
    }
  }
}

int64_t ctas_for(const Codec& codec) {
  const int64_t block_threads = codec.block < kWarp * kEach ? codec.block / kEach : kWarp;
  const int64_t each = kThreads / block_threads;
  return (num_blocks_of(codec) + each - 1) / each;
}

// Launches the kernel that Kernels has for a call that encodes.
template <template <class, int, bool> class Kernels, class Call>
void launch_encoding(const Call& given, const char* op, void* stream) {
  Call call = given;
  call.codec = walked(given.codec);
  if (call.codec.numel == 0) return;
  with_format(call.codec.format, [&](auto format) {
    using Format = decltype(format);
    with_steps<Format>(call.codec, [&](auto steps) {
      constexpr int kSteps = decltype(steps)::value;
      const int64_t ctas = ctas_for(call.codec);
      if (call.chance.is_stochastic) launch<Kernels<Format, kSteps, true>::kernel>(op, ctas, kThreads, stream, call);
      else launch<Kernels<Format, kSteps, false>::kernel>(op, ctas, kThreads, stream, call);
    });
  });
}

template <class Format, int kSteps, bool kStochastic>
struct Encode {
  static constexpr auto kernel = codec_encode_kernel<Format, kSteps, kStochastic>;
};

template <class Format, int kSteps, bool kStochastic>
struct SumEncode {
  static constexpr auto kernel = codec_sum_encode_kernel<Format, kSteps, kStochastic>;
};

}  // namespace

// ---- entry points ----

void codec_encode_cuda(const DeviceLayout&, void* stream, const EncodeCall& call) {
  launch_encoding<Encode>(call, "codec_encode", stream);
}

void codec_sum_encode_cuda(const DeviceLayout&, void* stream, const SumEncodeCall& call) {
  launch_encoding<SumEncode>(call, "codec_sum_encode", stream);
}

void codec_sum_cuda(const DeviceLayout&, void* stream, const SumCall& call) {
  const Codec codec = walked(call.codec);
  if (codec.numel == 0) return;
  with_format(codec.format, [&](auto format) {
    using Format = decltype(format);
    with_type(call.out.dtype, [&](auto out_t) {
      using Out = decltype(out_t);
      with_steps<Format>(codec, [&](auto steps) {
        launch<codec_sum_kernel<Format, decltype(steps)::value, Out>>(
            "codec_sum", ctas_for(codec), kThreads, stream, codec, call.payloads, as<Out>(call.out.data));
      });
    });
  });
}

}  // namespace pyengine
