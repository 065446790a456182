// codec: encoding of values in one or two bytes, with one scale per block, and sums of encoded values. See
// codec.h for the rules.
#include "../codec.h"
#include "codes.cuh"
#include "launch.cuh"
#include "sweep.cuh"

namespace pyengine {
namespace {

// ---- kernels ----

// Neighboring threads share a block and keep its values in registers from the computation of the scale to the
// encoding. A block is split into runs; in each run a thread has four neighboring elements.
constexpr int kWarp = 32;

// Number of runs in a block: as many as `most_lanes` threads need. If that is more than four, the number is
// four, or the number of runs that a whole warp needs if that is larger.
constexpr int runs_of(int block, int most_lanes) {
  const int wanted = block / (most_lanes * kEach), fewest = block / (kWarp * kEach);
  return wanted <= 1 ? 1 : wanted <= 4 ? wanted : fewest > 4 ? fewest : 4;
}

// The position of a thread's elements. `kWhole` means that all elements of its CTA exist, which reduces the
// instructions to a third.
template <int kBlock, int kMostLanes, bool kWhole>
struct Spot {
  static constexpr int kRuns = runs_of(kBlock, kMostLanes), kEachThread = kRuns * kEach;
  static constexpr unsigned kLanes = kBlock / kEachThread;  // threads per block
  int lane;       // index among the threads of the block
  int64_t begin;  // first element of the thread's first run
  int left;       // number of existing elements from `begin` on, at most kBlock; <= 0 if there are none

  __device__ __forceinline__ explicit Spot(int64_t numel)
      : lane(static_cast<int>(threadIdx.x % kLanes)),
        begin(static_cast<int64_t>(blockIdx.x) * kThreads * kEachThread + threadIdx.x / kLanes * kBlock +
              threadIdx.x % kLanes * kEach) {
    left = static_cast<int>(numel - begin < kBlock ? numel - begin : kBlock);
  }

  __device__ __forceinline__ int64_t block() const { return static_cast<uint64_t>(begin) / kBlock; }
  __device__ __forceinline__ static constexpr int step(int k) { return k * static_cast<int>(kLanes) * kEach; }
  __device__ __forceinline__ int64_t at(int k) const { return begin + step(k); }
  // Number of existing elements from at(k) on; zero or less if there are none. (If it is clamped to [0,
  // kEach], ptxas 13.0 takes the comparison with kEach from the wrong predicate on sm_90.)
  __device__ __forceinline__ int count(int k) const { return kWhole ? kEach : left - step(k); }
  __device__ __forceinline__ bool is_whole(int k) const { return count(k) >= kEach; }
  __device__ __forceinline__ bool exists() const { return kWhole || left > 0; }
};

// Calls fn with the position of this thread's elements.
template <int kBlock, int kMostLanes, class Fn>
__device__ __forceinline__ void at_spot(int64_t numel, const Fn& fn) {
  using Whole = Spot<kBlock, kMostLanes, true>;
  if ((static_cast<int64_t>(blockIdx.x) + 1) * kThreads * Whole::kEachThread <= numel) fn(Whole(numel));
  else fn(Spot<kBlock, kMostLanes, false>(numel));
}

template <int kRuns>
struct Values {
  Floats<kEach> run[kRuns];
};

// Missing elements read as zero. A thread's elements have the same alignment as `p`.
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
__device__ __forceinline__ Values<Spot::kRuns> load_values(const Spot& spot, const float* p) {
  Values<Spot::kRuns> x;
#pragma unroll
  for (int k = 0; k < Spot::kRuns; ++k) x.run[k] = load_floats(spot, k, p);
  return x;
}

// `codes` points to the codes of this thread's first run.
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

// Maximum of `mine` over the threads of a block. All threads of a warp must call this, including those
// without a block.
template <class Spot>
__device__ __forceinline__ unsigned largest_of_block(unsigned mine) {
  if constexpr (Spot::kLanes == kWarp) {
    return __reduce_max_sync(0xffffffffu, mine);
  } else {
#pragma unroll
    for (int distance = Spot::kLanes / 2; distance > 0; distance /= 2) {
      const unsigned other = __shfl_xor_sync(0xffffffffu, mine, distance);
      mine = other > mine ? other : mine;
    }
    return mine;
  }
}

template <class Spot, class Weight>
__device__ __forceinline__ unsigned largest_weight(const Values<Spot::kRuns>& x, Weight weight) {
  unsigned largest = 0;
#pragma unroll
  for (int k = 0; k < Spot::kRuns; ++k)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const unsigned other = weight(as_bits(x.run[k].lane[i]));
      largest = other > largest ? other : largest;
    }
  return largest_of_block<Spot>(largest);
}

struct Scaling {
  float scale = 1, inverse = 1;
  bool is_finite = true;  // whether all values of the block are finite
};

template <class Format, class Spot>
__device__ __forceinline__ Scaling agree_on_scale(const Values<Spot::kRuns>& x) {
  unsigned largest = largest_weight<Spot>(x, [](unsigned bits) { return bits & kMagnitude; });
  const bool is_finite = largest < kFloatInfinity;
  // Ignore nonfinite values. They are rare, so the check costs nothing.
  if (__any_sync(0xffffffffu, !is_finite)) largest = largest_weight<Spot>(x, weight_of);
  const float scale = quick_scale_of<Format>(largest);
  return {scale, quick_inverse_of(scale), is_finite};
}

// Encodes nonfinite values; the codes of finite values come from `Four`.
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

// Errors of encoded values: 0 if a value or its decoded value is not finite.
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
__device__ __forceinline__ void encode_block(const Spot& spot, const Values<Spot::kRuns>& x, const Parts<Format>& to,
                                             float* residual, bool adds, const Chance& chance) {
  Scaling by;
  if constexpr (kHasScale<Format>) {
    by = agree_on_scale<Format, Spot>(x);
    if (spot.lane == 0 && spot.exists()) *global(to.scales + spot.block()) = by.scale;
  }
#pragma unroll
  for (int k = 0; k < Spot::kRuns; ++k) {
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

template <class Format, int kBlock, bool kStochastic>
__global__ void __launch_bounds__(kThreads)
codec_encode_kernel(const __grid_constant__ EncodeCall call) {
  at_spot<kBlock, kWarp>(call.codec.numel, [&](const auto& spot) {
    auto x = load_values(spot, call.values);
    if (call.residual) {
      const auto more = load_values(spot, call.residual);
#pragma unroll
      for (int k = 0; k < spot.kRuns; ++k) x.run[k] = x.run[k] + more.run[k];
    }
    const Parts<Format> to(call.codec, call.payload);
    encode_block<Format, kStochastic>(spot, x, to, call.residual, false, call.chance);
  });
}

// ---- sums ----

// Minimum number of CTAs per SM for kernels that sum; 0 lets ptxas decide. With this bound, ptxas uses the
// registers that the loads of two ranks need; otherwise a kernel waits for one load before it issues the
// next.
template <class Format, int kRuns>
constexpr int kSumCtas = kRuns < 4 || (kRuns == 4 && (__is_same(Format, Int8) || kConverts<Format>)) ? 5 : 0;

// One rank's codes and scale, before they are added.
template <class Format, int kRuns>
struct Sent {
  Quad<typename Format::Code> run[kRuns];
  float scale;
};

template <class Format, class Spot>
__device__ __forceinline__ Values<Spot::kRuns> sum_block(const Spot& spot, const Codec& codec,
                                                          const Payloads& payloads) {
  using Code = typename Format::Code;
  constexpr int kRuns = Spot::kRuns;
  const uint8_t* scale = payloads.data + spot.block() * sizeof(float);
  const uint8_t* codes = payloads.data + codec.scale_bytes() + spot.begin * sizeof(Code);
  Values<kRuns> sum;
  typename Four<Format>::Nans nans;
  const auto load = [&] {
    Sent<Format, kRuns> sent{};
#pragma unroll
    for (int k = 0; k < kRuns; ++k) sent.run[k] = load_quad(spot, k, reinterpret_cast<const Code*>(codes));
    if (kHasScale<Format> && spot.exists()) sent.scale = *global(reinterpret_cast<const float*>(scale));
    scale += payloads.stride, codes += payloads.stride;
    return sent;
  };
  const auto add = [&](const Sent<Format, kRuns>& sent, bool is_first) {
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
      nans.see(sent.run[k]);
      const Floats<kEach> values = Four<Format>::decode(sent.run[k]);
      const Floats<kEach> term = kHasScale<Format> ? values * sent.scale : values;
      sum.run[k] = is_first ? term : sum.run[k] + term;
    }
  };
  const auto add_two = [&](bool is_first) {
    const Sent<Format, kRuns> one = load(), other = load();  // both in flight
    add(one, is_first);
    add(other, false);
  };
  int left = static_cast<int>(payloads.num_ranks);  // at least one
  if (left > 1) add_two(true);
  else add(load(), true);
#pragma unroll 1
  for (left -= 2; left > 1; left -= 2) add_two(false);
  if (left == 1) add(load(), false);
  if (nans.some()) {  // rare, so the NaNs are located only now
    codes -= payloads.num_ranks * payloads.stride;
#pragma unroll 1
    for (int64_t rank = 0; rank < payloads.num_ranks; ++rank, codes += payloads.stride)
#pragma unroll
      for (int k = 0; k < kRuns; ++k)
        Four<Format>::put_nans(load_quad(spot, k, reinterpret_cast<const Code*>(codes)), sum.run[k]);
  }
  return sum;
}

// The kernel is limited by instructions, and the work done once per thread, such as the block's scale, takes
// as many instructions as five elements. So fewer threads handle more elements each.
template <class Format>
constexpr int kSumEncodeLanes = kHasScale<Format> ? kWarp / 2 : kWarp;

template <class Format, int kBlock, bool kStochastic>
__global__ void __launch_bounds__(kThreads, kSumCtas<Format, runs_of(kBlock, kSumEncodeLanes<Format>)>)
codec_sum_encode_kernel(const __grid_constant__ SumEncodeCall call) {
  at_spot<kBlock, kSumEncodeLanes<Format>>(call.codec.numel, [&](const auto& spot) {
    auto sum = sum_block<Format>(spot, call.codec, call.payloads);
    // The padding of the last word may have any value in the input; in the output it is zero.
#pragma unroll
    for (int k = 0; k < spot.kRuns; ++k)
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (i >= spot.count(k)) sum.run[k].lane[i] = 0;
    const Parts<Format> to(call.codec, call.out);
    encode_block<Format, kStochastic>(spot, sum, to, call.residual, true, call.chance);
  });
}

template <class Format, int kBlock, class Out>
__global__ void __launch_bounds__(kThreads, kSumCtas<Format, runs_of(kBlock, kWarp)>)
codec_sum_kernel(const __grid_constant__ Codec codec, const __grid_constant__ Payloads payloads, Out* out) {
  at_spot<kBlock, kWarp>(codec.numel, [&](const auto& spot) {
    const auto sum = sum_block<Format>(spot, codec, payloads);
#pragma unroll
    for (int k = 0; k < spot.kRuns; ++k) {
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

template <int kValue>
using Number = std::integral_constant<int, kValue>;

// Calls fn with the codec's block size. For formats without scales, blocks only determine how threads share
// the elements.
template <class Format, class Fn>
void with_block(const Codec& codec, const Fn& fn) {
  if constexpr (!kHasScale<Format>) {
    fn(Number<256>{});
  } else {
    switch (codec.block) {
      case 32: return fn(Number<32>{});
      case 64: return fn(Number<64>{});
      case 128: return fn(Number<128>{});
      case 256: return fn(Number<256>{});
      case 512: return fn(Number<512>{});
      case 1024: return fn(Number<1024>{});
    }
    throw std::invalid_argument("codec: a block of " + std::to_string(codec.block) + " elements; expected 32 to 1024");
  }
}

int64_t ctas_for(int64_t numel, int runs) {
  const int64_t each = kThreads * kEach * runs;
  return (numel + each - 1) / each;
}

template <class Format, int kBlock, bool kStochastic>
struct Encode {
  static constexpr auto kernel = codec_encode_kernel<Format, kBlock, kStochastic>;
  static constexpr int kRuns = runs_of(kBlock, kWarp);
};

template <class Format, int kBlock, bool kStochastic>
struct SumEncode {
  static constexpr auto kernel = codec_sum_encode_kernel<Format, kBlock, kStochastic>;
  static constexpr int kRuns = runs_of(kBlock, kSumEncodeLanes<Format>);
};

// Launches the encoding kernel that `Kernels` selects for a call.
template <template <class, int, bool> class Kernels, class Call>
void launch_encoding(const Call& call, const char* op, void* stream) {
  if (call.codec.numel == 0) return;
  with_format(call.codec.format, [&](auto format) {
    with_block<decltype(format)>(call.codec, [&](auto block) {
      const auto launch_of = [&](auto kernels) {
        using Chosen = decltype(kernels);
        launch<Chosen::kernel>(op, ctas_for(call.codec.numel, Chosen::kRuns), kThreads, stream, call);
      };
      constexpr int kBlock = decltype(block)::value;
      if (call.chance.is_stochastic) launch_of(Kernels<decltype(format), kBlock, true>{});
      else launch_of(Kernels<decltype(format), kBlock, false>{});
    });
  });
}

}  // namespace

// ---- entry points ----

void codec_encode_cuda(const DeviceLayout&, void* stream, const EncodeCall& call) {
  launch_encoding<Encode>(call, "codec_encode", stream);
}

void codec_sum_encode_cuda(const DeviceLayout&, void* stream, const SumEncodeCall& call) {
  launch_encoding<SumEncode>(call, "codec_sum_encode", stream);
}

void codec_sum_cuda(const DeviceLayout&, void* stream, const SumCall& call) {
  if (call.codec.numel == 0) return;
  with_format(call.codec.format, [&](auto format) {
    with_type(call.out.dtype, [&](auto out_t) {
      using Out = decltype(out_t);
      with_block<decltype(format)>(call.codec, [&](auto block) {
        constexpr int kBlock = decltype(block)::value;
        launch<codec_sum_kernel<decltype(format), kBlock, Out>>(
            "codec_sum", ctas_for(call.codec.numel, runs_of(kBlock, kWarp)), kThreads, stream, call.codec,
            call.payloads, as<Out>(call.out.data));
      });
    });
  });
}

}  // namespace pyengine
