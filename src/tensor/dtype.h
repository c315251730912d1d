#pragma once
// Element types of weights and KV rows, and their exact conversions. Rounding to bf16 and f16 is
// to nearest, ties to even, as IEEE 754 asks; NaN stays NaN.
#include <bit>
#include <cstdint>
#include <string_view>

namespace clo {

enum class DType : uint8_t { kF32, kF16, kBF16 };

constexpr int64_t dtype_bytes(DType type) { return type == DType::kF32 ? 4 : 2; }
constexpr std::string_view dtype_name(DType type) {
  return type == DType::kF32 ? "f32" : (type == DType::kF16 ? "f16" : "bf16");
}

constexpr float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

constexpr uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float value);

// e4m3: four exponent bits with bias 7, three of mantissa, subnormals in steps of 2^-9, no
// infinities; S.1111.111 is NaN. Rounding is to nearest, ties to even, and saturates: beyond 448,
// infinities included, it is +-448. A NaN becomes 0x7F, whatever its sign.
float e4m3_to_f32(uint8_t bits);
uint8_t f32_to_e4m3(float value);

// Converts `count` elements at `source` (of `type`, any alignment) to f32 and back.
void convert_to_f32(DType type, const void* source, float* target, int64_t count);
void convert_from_f32(DType type, const float* source, void* target, int64_t count);

}  // namespace clo
