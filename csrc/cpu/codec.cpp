// codec: encoding of values in one or two bytes, with one scale per block, and sums of encoded values. See
// codec.h for the rules.
//
// The loops are plain: each has only 32-bit lanes, and the compiler vectorizes it for each instruction set,
// with the same bits. Values that a block needs twice stay in the L1 cache.
#include "chunks.h"

namespace pyengine::PYENGINE_ISA {
namespace {

// ---- kernels ----

// The scale, codes and elements of a block.
template <class Format>
struct Place {
  float* scale;  // null if the format has no scales
  typename Format::Code* codes;
  int64_t begin, count;
};

uint32_t largest_of(const float* x, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t weight = static_cast<int32_t>(weight_of(as_bits(x[i])));
    largest = weight > largest ? weight : largest;
  }
  return static_cast<uint32_t>(largest);
}

enum class Error { dropped, stored, added };

// Writes the codes of n elements of x, and their errors.
template <class Format, bool kStochastic, Error kError>
void encode_kernel(typename Format::Code* __restrict codes, const float* __restrict x, float* __restrict residual,
                   int64_t n, float scale, float inverse, const Chance chance) {
  for (int64_t i = 0; i < n; ++i) {
    const float y = kHasScale<Format> ? x[i] * inverse : x[i];
    const uint32_t random = kStochastic ? hashed(chance, static_cast<uint32_t>(i)) : 0;
    const uint32_t code = Format::template code<kStochastic>(as_bits(x[i]), as_bits(y), random);
    codes[i] = static_cast<typename Format::Code>(code);
    if constexpr (kError != Error::dropped) {
      const float meaning = as_float(Format::meaning(code));
      const float error = error_of(x[i], kHasScale<Format> ? meaning * scale : meaning);
      residual[i] = kError == Error::added ? residual[i] + error : error;
    }
  }
}

template <class Format, Error kError>
void encode_block(const Place<Format>& to, const float* x, float* residual, Chance chance) {
  float scale = 1, inverse = 1;
  if constexpr (kHasScale<Format>) {
    scale = scale_of<Format>(largest_of(x, to.count));
    inverse = inverse_of(scale);
    *to.scale = scale;
  }
  chance.offset += static_cast<uint32_t>(to.begin);
  const auto run = chance.is_stochastic ? encode_kernel<Format, true, kError> : encode_kernel<Format, false, kError>;
  run(to.codes, x, residual, to.count, scale, inverse, chance);
}

// Writes n decoded values to `sum`, or adds them if kAdds.
template <class Format, bool kAdds>
void decode_kernel(float* __restrict sum, const typename Format::Code* __restrict codes, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) {
    const float meaning = as_float(Format::meaning(codes[i]));
    const float value = kHasScale<Format> ? meaning * scale : meaning;
    sum[i] = kAdds ? sum[i] + value : value;
  }
}

// The same for two ranks, one after the other, which keeps the sum in a register.
template <class Format, bool kAdds>
void decode_two_kernel(float* __restrict sum, const typename Format::Code* __restrict codes,
                       const typename Format::Code* __restrict more, int64_t n, float scale, float more_scale) {
  for (int64_t i = 0; i < n; ++i) {
    const float meaning = as_float(Format::meaning(codes[i])), other = as_float(Format::meaning(more[i]));
    const float value = kHasScale<Format> ? meaning * scale : meaning;
    sum[i] = (kAdds ? sum[i] + value : value) + (kHasScale<Format> ? other * more_scale : other);
  }
}

void add_kernel(float* __restrict x, const float* __restrict values, const float* __restrict residual, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = values[i] + residual[i];
}

template <class Out>
void narrow_kernel(Out* out, const float* x, int64_t n) {
  sweep(out, n, false, [&](int64_t i, auto access) PYENGINE_INLINE { access.store(out + i, pack<Out>(access.load(x + i))); });
}

// ---- dispatch ----

// Formats without scales are also processed in blocks.
Codec walked(Codec codec) {
  if (codec.block == 1) codec.block = kMostBlock;
  return codec;
}

template <class Format>
Place<Format> place_of(const Codec& codec, const uint8_t* payload, int64_t index) {
  using Code = typename Format::Code;
  auto* scales = reinterpret_cast<float*>(const_cast<uint8_t*>(payload));
  const int64_t begin = index * codec.block, left = codec.numel - begin;
  auto* codes = reinterpret_cast<Code*>(const_cast<uint8_t*>(payload) + codec.scale_bytes());
  return {kHasScale<Format> ? scales + index : nullptr, codes + begin, begin, left < codec.block ? left : codec.block};
}

// Calls body(index) for every block.
template <class Body>
void for_each_block(const Codec& codec, const Body& body) {
  for_each_range(num_blocks_of(codec), kTaskElements / codec.block, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) body(index);
  });
}

template <class Format>
void sum_block(float* sum, const Codec& codec, const Payloads& payloads, int64_t index) {
  const auto sent = [&](int64_t rank) { return place_of<Format>(codec, payloads.data + rank * payloads.stride, index); };
  const auto scale = [](const Place<Format>& from) { return kHasScale<Format> ? *from.scale : 1.0f; };
  int64_t rank = 0;
  for (; rank + 2 <= payloads.num_ranks; rank += 2) {
    const Place<Format> one = sent(rank), two = sent(rank + 1);
    const auto run = rank == 0 ? decode_two_kernel<Format, false> : decode_two_kernel<Format, true>;
    run(sum, one.codes, two.codes, one.count, scale(one), scale(two));
  }
  if (rank < payloads.num_ranks) {
    const Place<Format> last = sent(rank);
    const auto run = rank == 0 ? decode_kernel<Format, false> : decode_kernel<Format, true>;
    run(sum, last.codes, last.count, scale(last));
  }
}

template <class Format>
void write_filling(const Codec& codec, uint8_t* payload) {
  if constexpr (kHasScale<Format>) {
    uint8_t* codes = payload + codec.scale_bytes();
    for (int64_t i = codec.numel; i < round_up_to_four(codec.numel); ++i) codes[i] = 0;
  }
}

template <class Format>
void encode_typed(const Codec& codec, const EncodeCall& call) {
  for_each_block(codec, [&](int64_t index) {
    const Place<Format> to = place_of<Format>(codec, call.payload, index);
    const float* values = call.values + to.begin;
    if (!call.residual) return encode_block<Format, Error::dropped>(to, values, nullptr, call.chance);
    alignas(64) float x[kMostBlock];
    add_kernel(x, values, call.residual + to.begin, to.count);
    encode_block<Format, Error::stored>(to, x, call.residual + to.begin, call.chance);
  });
  write_filling<Format>(codec, call.payload);
}

template <class Format>
void sum_encode_typed(const Codec& codec, const SumEncodeCall& call) {
  for_each_block(codec, [&](int64_t index) {
    const Place<Format> to = place_of<Format>(codec, call.out, index);
    alignas(64) float sum[kMostBlock];
    sum_block<Format>(sum, codec, call.payloads, index);
    if (!call.residual) return encode_block<Format, Error::dropped>(to, sum, nullptr, call.chance);
    encode_block<Format, Error::added>(to, sum, call.residual + to.begin, call.chance);
  });
  write_filling<Format>(codec, call.out);
}

template <class Format, class Out>
void sum_typed(const Codec& codec, const SumCall& call) {
  Out* out = as<Out>(call.out.data);
  for_each_block(codec, [&](int64_t index) {
    const int64_t begin = index * codec.block, left = codec.numel - begin;
    if constexpr (__is_same(Out, float)) {
      sum_block<Format>(out + begin, codec, call.payloads, index);
    } else {
      alignas(64) float sum[kMostBlock];
      sum_block<Format>(sum, codec, call.payloads, index);
      narrow_kernel(out + begin, sum, left < codec.block ? left : codec.block);
    }
  });
}

}  // namespace

// ---- entry points ----

void codec_encode_cpu(const Layout&, const EncodeCall& call) {
  with_format(call.codec.format, [&](auto format) { encode_typed<decltype(format)>(walked(call.codec), call); });
}

void codec_sum_encode_cpu(const Layout&, const SumEncodeCall& call) {
  with_format(call.codec.format, [&](auto format) { sum_encode_typed<decltype(format)>(walked(call.codec), call); });
}

void codec_sum_cpu(const Layout&, const SumCall& call) {
  with_format(call.codec.format, [&](auto format) {
    with_type(call.out.dtype, [&](auto out) { sum_typed<decltype(format), decltype(out)>(walked(call.codec), call); });
  });
}

}  // namespace pyengine::PYENGINE_ISA
