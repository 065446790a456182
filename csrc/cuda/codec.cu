// codec: values in one or two bytes each, with a scale a block, and sums of them. codec.h has the rules.
#include "../codec.h"
#include "launch.cuh"
#include "sweep.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

// Neighbouring threads share a block, which they keep in registers between its scale and its codes. In each of kSteps
// runs of a block a thread has four neighbouring elements: sixteen bytes of float32 and four of codes.
constexpr int kEach = 4, kWarp = 32;

// The position of a thread's elements.
template <int kSteps>
struct Spot {
  int lanes, lane;  // number of threads of its block, and this thread's index
  int64_t block, numel;
  int64_t begin;  // first element of its first run

  __device__ __forceinline__ explicit Spot(const Codec& codec)
      : lanes(kSteps > 1 ? kWarp : static_cast<int>(codec.block) / kEach),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        block(static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes),
        numel(codec.numel),
        begin(block * codec.block + lane * kEach) {}

  __device__ __forceinline__ int64_t at(int step) const { return begin + step * lanes * kEach; }
  // Number of existing elements from at(step) on.
  __device__ __forceinline__ int count(int step) const {
    const int64_t left = numel - at(step);
    return left < 0 ? 0 : left < kEach ? static_cast<int>(left) : kEach;
  }
};

template <int kSteps>
struct Values {
  Floats<kEach> run[kSteps];
};

// Missing elements read as zero.
__device__ __forceinline__ Floats<kEach> load_floats(const float* p, int count) {
  if (count == kEach && misalignment(p) == 0) return widen(load_packed<kEach>(p));
  return widen(load_some<kEach>(p, count));
}

__device__ __forceinline__ void store_floats(float* p, const Floats<kEach>& x, int count) {
  const Packed<float, kEach> packed = narrow<float>(x);
  if (count == kEach && misalignment(p) == 0) store_packed(p, packed);
  else store_some(p, packed, count);
}

template <int kSteps>
__device__ __forceinline__ Values<kSteps> load_values(const Spot<kSteps>& spot, const float* p) {
  Values<kSteps> x;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) x.run[k] = load_floats(p + spot.at(k), spot.count(k));
  return x;
}

// Four codes in one word, or two: a payload of one-byte codes is padded to whole words; others may begin anywhere.
template <class Code>
struct Quad {
  unsigned words[sizeof(Code)];

  __device__ __forceinline__ unsigned code(int i) const {
    if constexpr (sizeof(Code) == 1) return words[0] >> (8 * i) & 0xffu;
    else return words[i / 2] >> (i % 2 * 16) & 0xffffu;
  }
  // Called once for every code, on zeros.
  __device__ __forceinline__ void set(int i, unsigned code) {
    if constexpr (sizeof(Code) == 1) words[0] |= code << (8 * i);
    else words[i / 2] |= code << (i % 2 * 16);
  }
};

template <class Code>
__device__ __forceinline__ Quad<Code> load_quad(const Code* p, int count) {
  Quad<Code> quad{};
  if constexpr (sizeof(Code) == 1) {
    if (count > 0) quad.words[0] = *reinterpret_cast<const unsigned*>(global(p));
  } else if (count == kEach && misalignment(p) % 4 == 0) {
    const unsigned* words = reinterpret_cast<const unsigned*>(global(p));
    quad.words[0] = words[0], quad.words[1] = words[1];
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i < count) quad.set(i, p[i]);
  }
  return quad;
}

template <class Code>
__device__ __forceinline__ void store_quad(Code* p, const Quad<Code>& quad, int count) {
  if constexpr (sizeof(Code) == 1) {
    if (count > 0) *reinterpret_cast<unsigned*>(global(p)) = quad.words[0];
  } else if (count == kEach && misalignment(p) % 4 == 0) {
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

// All threads of a warp run this, also those without a block.
template <class Format, int kSteps>
__device__ __forceinline__ float agree_on_scale(const Spot<kSteps>& spot, const Values<kSteps>& x) {
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const unsigned weight = weight_of(as_bits(x.run[k].lane[i]));
      largest = weight > largest ? weight : largest;
    }
  for (int distance = spot.lanes / 2; distance > 0; distance /= 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, largest, distance);
    largest = other > largest ? other : largest;
  }
  return scale_of<Format>(largest);
}

// Replaces x by its error.
template <class Format, bool kStochastic>
__device__ __forceinline__ Quad<typename Format::Code> encode_run(Floats<kEach>& x, float scale, float inverse,
                                                                  const Chance& chance, int64_t at) {
  Quad<typename Format::Code> quad{};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float value = x.lane[i], y = kHasScale<Format> ? value * inverse : value;
    const uint32_t random = kStochastic ? hashed(chance, static_cast<uint32_t>(at + i)) : 0;
    const uint32_t code = Format::template code<kStochastic>(as_bits(value), as_bits(y), random);
    const float meaning = as_float(Format::meaning(code));
    x.lane[i] = error_of(value, kHasScale<Format> ? meaning * scale : meaning);
    quad.set(i, code);
  }
  return quad;
}

template <class Format, int kSteps, bool kStochastic>
__device__ __forceinline__ void encode_block(const Spot<kSteps>& spot, Values<kSteps>& x, const Parts<Format>& to,
                                             float* residual, bool adds, const Chance& chance) {
  float scale = 1, inverse = 1;
  if constexpr (kHasScale<Format>) {
    scale = agree_on_scale<Format>(spot, x);
    inverse = inverse_of(scale);
    if (spot.lane == 0 && spot.count(0) > 0) *global(to.scales + spot.block) = scale;
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t at = spot.at(k);
    const int count = spot.count(k);
    store_quad(to.codes + at, encode_run<Format, kStochastic>(x.run[k], scale, inverse, chance, at), count);
    if (!residual) continue;
    if (adds) x.run[k] = load_floats(residual + at, count) + x.run[k];
    store_floats(residual + at, x.run[k], count);
  }
}

template <class Format, int kSteps, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
codec_encode_kernel(const __grid_constant__ EncodeCall call) {
  const Spot<kSteps> spot(call.codec);
  Values<kSteps> x = load_values(spot, call.values);
  if (call.residual) {
    const Values<kSteps> more = load_values<kSteps>(spot, call.residual);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) x.run[k] = x.run[k] + more.run[k];
  }
  const Parts<Format> to(call.codec, call.payload);
  encode_block<Format, kSteps, kStochastic>(spot, x, to, call.residual, false, call.chance);
}

// The codes of one rank before they are added, so that several loads are in flight at once.
template <class Format, int kSteps>
struct Sent {
  Quad<typename Format::Code> run[kSteps];
  float scale;
};

template <class Format, int kSteps>
__device__ __forceinline__ Sent<Format, kSteps> load_sent(const Spot<kSteps>& spot, const Codec& codec,
                                                          const uint8_t* payload) {
  const Parts<Format> from(codec, payload);
  Sent<Format, kSteps> sent{};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) sent.run[k] = load_quad(from.codes + spot.at(k), spot.count(k));
  if (kHasScale<Format> && spot.count(0) > 0) sent.scale = *global(from.scales + spot.block);
  return sent;
}

template <class Format, int kSteps>
__device__ __forceinline__ void add_sent(Values<kSteps>& sum, const Sent<Format, kSteps>& sent, bool is_first) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float meaning = as_float(Format::meaning(sent.run[k].code(i)));
      const float value = kHasScale<Format> ? meaning * sent.scale : meaning;
      sum.run[k].lane[i] = is_first ? value : sum.run[k].lane[i] + value;
    }
}

template <class Format, int kSteps>
__device__ __forceinline__ Values<kSteps> sum_block(const Spot<kSteps>& spot, const Codec& codec,
                                                    const Payloads& payloads) {
  constexpr int kAhead = kSteps < 8 ? 8 / kSteps : 1;
  Values<kSteps> sum{};
  for (int64_t rank = 0; rank < payloads.num_ranks; rank += kAhead) {
    Sent<Format, kSteps> sent[kAhead];
#pragma unroll
    for (int r = 0; r < kAhead; ++r)
      if (rank + r < payloads.num_ranks)
        sent[r] = load_sent<Format>(spot, codec, payloads.data + (rank + r) * payloads.stride);
#pragma unroll
    for (int r = 0; r < kAhead; ++r)
      if (rank + r < payloads.num_ranks) add_sent<Format>(sum, sent[r], rank + r == 0);
  }
  return sum;
}

template <class Format, int kSteps, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
codec_sum_encode_kernel(const __grid_constant__ SumEncodeCall call) {
  const Spot<kSteps> spot(call.codec);
  Values<kSteps> sum = sum_block<Format>(spot, call.codec, call.payloads);
  // The padding of the last word may have any value in the input; here it is zero.
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i >= spot.count(k)) sum.run[k].lane[i] = 0;
  const Parts<Format> to(call.codec, call.out);
  encode_block<Format, kSteps, kStochastic>(spot, sum, to, call.residual, true, call.chance);
}

template <class Format, int kSteps, class Out>
__global__ void __launch_bounds__(kThreads)
codec_sum_kernel(const __grid_constant__ Codec codec, const __grid_constant__ Payloads payloads, Out* out) {
  const Spot<kSteps> spot(codec);
  const Values<kSteps> sum = sum_block<Format>(spot, codec, payloads);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t at = spot.at(k);
    if constexpr (__is_same(Out, float)) {
      store_floats(out + at, sum.run[k], spot.count(k));
    } else {
      const Packed<Out, kEach> narrowed = narrow<Out>(sum.run[k]);
      const Quad<uint16_t> quad{narrowed.words[0], narrowed.words[1]};
      store_quad(reinterpret_cast<uint16_t*>(out) + at, quad, spot.count(k));
    }
  }
}

// ---- dispatch ----

// Formats without scales are processed in blocks, too.
Codec walked(Codec codec) {
  if (codec.block == 1) codec.block = 2 * kWarp * kEach;
  return codec;
}

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

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
