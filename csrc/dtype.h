// The element types the core knows, as storage: no arithmetic here.
#pragma once
#include <cstdint>

namespace pyengine {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

// The values are the codes that pyengine/_ops.py sends.
enum class DType : int { f32 = 0, bf16 = 1, fp16 = 2 };

}  // namespace pyengine
