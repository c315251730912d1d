#include "ops/stored_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace clo {

namespace {

constexpr float kSmallest = 0x1p-100f;

// Codes of one half; returns its scale.
float compress_half(const float* x, int32_t count, std::byte* codes) {
  float largest = 0;
  bool finite = true;
  for (int32_t d = 0; d < count; ++d) {
    finite = finite && std::isfinite(x[d]);
    largest = std::max(largest, std::abs(x[d]));
  }
  if (!finite || largest < kSmallest) {
    std::memset(codes, 0, static_cast<size_t>(count));
    return finite ? 0.0f : std::bit_cast<float>(0x7FC00000u);
  }
  const float inverse = 127.0f / largest;
  for (int32_t d = 0; d < count; ++d) {
    const float code = std::clamp(std::rint(x[d] * inverse), -127.0f, 127.0f);
    codes[d] = static_cast<std::byte>(static_cast<int8_t>(code));
  }
  return largest / 127.0f;
}

void expand_half(const KvShape& shape, const std::byte* codes, float scale, int32_t count,
                 float* x) {
  for (int32_t d = 0; d < count; ++d) {
    const auto code = static_cast<uint8_t>(codes[d]);
    x[d] = shape.stored == RowFormat::kInt8 ? static_cast<float>(static_cast<int8_t>(code)) * scale
                                            : e4m3_to_f32(code);
  }
}

struct Scales {
  float key = 1, value = 1;
};
Scales scales_of(const KvShape& shape, const std::byte* stored) {
  Scales scales;
  if (shape.stored == RowFormat::kInt8) {
    std::memcpy(&scales, stored + shape.scale_offset(), sizeof scales);
  }
  return scales;
}

}  // namespace

void compress_row(const KvShape& shape, const float* key, const float* value, std::byte* stored) {
  const int32_t dim = shape.head_dim;
  std::memset(stored + 2 * dim, 0, static_cast<size_t>(shape.stored_row_bytes() - 2 * dim));
  if (shape.stored == RowFormat::kFp8) {
    for (int32_t d = 0; d < dim; ++d) {
      stored[d] = static_cast<std::byte>(f32_to_e4m3(key[d]));
      stored[dim + d] = static_cast<std::byte>(f32_to_e4m3(value[d]));
    }
    return;
  }
  const Scales scales = {compress_half(key, dim, stored), compress_half(value, dim, stored + dim)};
  std::memcpy(stored + shape.scale_offset(), &scales, sizeof scales);
}

void expand_row(const KvShape& shape, const std::byte* stored, float* key, float* value) {
  const Scales scales = scales_of(shape, stored);
  expand_half(shape, stored, scales.key, shape.head_dim, key);
  expand_half(shape, stored + shape.stored_value_offset(), scales.value, shape.head_dim, value);
}

void expand_to_full(const KvShape& shape, const std::byte* stored, std::byte* full) {
  const Scales scales = scales_of(shape, stored);
  constexpr int32_t kPiece = 64;
  float values[kPiece];
  for (const bool is_value : {false, true}) {
    const std::byte* codes = stored + (is_value ? shape.stored_value_offset() : 0);
    std::byte* half = full + (is_value ? shape.value_offset() : 0);
    for (int32_t d = 0; d < shape.head_dim; d += kPiece) {
      const int32_t count = std::min(kPiece, shape.head_dim - d);
      expand_half(shape, codes + d, is_value ? scales.value : scales.key, count, values);
      convert_from_f32(shape.type, values, half + d * dtype_bytes(shape.type), count);
    }
  }
}

}  // namespace clo
