// The storage types of the core's elements, and the bits of floats. No arithmetic is defined here.
#pragma once
#include <cstdint>
#include <stdexcept>

// Marks code that both the CPU and the CUDA compiler compile.
#ifdef __CUDACC__
#define PYENGINE_EVERYWHERE __host__ __device__
#else
#define PYENGINE_EVERYWHERE
#endif

namespace pyengine {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// The values match the codes that pyengine/ops/plan.py passes.
enum class DType : int { f32 = 0, bf16 = 1, fp16 = 2 };

inline constexpr int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Anonymous namespace, so that the linker never shares this code between files compiled for different
// instruction sets.
namespace {

// The bits of infinity in each type; with the sign cleared, only NaN is larger.
template <class T> constexpr int32_t kInfinity = 0x7f800000;
template <> inline constexpr int32_t kInfinity<bf16> = 0x7f80;
template <> inline constexpr int32_t kInfinity<fp16> = 0x7c00;

// 2^exponent, for exponents from -126 to 127.
PYENGINE_EVERYWHERE constexpr float power_of_two(int exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(exponent + 127) << 23);
}

// Calls fn(T{}) with the type of a dtype code.
template <class Fn>
void with_type(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::f32: return fn(float{});
    case DType::bf16: return fn(bf16{});
    case DType::fp16: return fn(fp16{});
  }
  throw std::invalid_argument("unknown dtype code");
}

// The same for two dtype codes.
template <class Fn>
void with_types(DType one, DType two, const Fn& fn) {
  with_type(one, [&](auto one_t) { with_type(two, [&](auto two_t) { fn(one_t, two_t); }); });
}

}  // namespace

}  // namespace pyengine
