#include "tensor/dtype.h"

#include <cstring>

namespace clo {

float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
  // Zero and subnormals: mantissa x 2^-24 is exact in f32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 2^-1 aligns the mantissa so that the hardware rounds at 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float e4m3_to_f32(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t exponent = (bits >> 3) & 0xFu;
  const uint32_t mantissa = bits & 0x7u;
  if (exponent == 0xF && mantissa == 0x7) return std::bit_cast<float>(sign | 0x7FC00000u);
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  }
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint8_t f32_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x43E00000u) return static_cast<uint8_t>(sign | 0x7Eu);  // 448 and more
  if (magnitude < 0x3C800000u) {
    // Below 2^-6: adding 2^14 aligns the mantissa so that the hardware rounds at 2^-9.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000u));
  }
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded - 0x3C000000u) >> 20));
}

void convert_to_f32(DType type, const void* source, float* target, int64_t count) {
  if (type == DType::kF32) {
    std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* bytes = static_cast<const unsigned char*>(source);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes + 2 * i, sizeof bits);
    target[i] = type == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
}

void convert_from_f32(DType type, const float* source, void* target, int64_t count) {
  if (type == DType::kF32) {
    std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto* bytes = static_cast<unsigned char*>(target);
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = type == DType::kBF16 ? f32_to_bf16(source[i]) : f32_to_f16(source[i]);
    std::memcpy(bytes + 2 * i, &bits, sizeof bits);
  }
}

}  // namespace clo
