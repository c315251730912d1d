#include "tensor/weight_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensor/half_bytes.h"

namespace clo {

namespace {

float half_of(float value) { return f16_to_f32(f32_to_f16(value)); }

int8_t nearest(float value, int low, int high) {
  return static_cast<int8_t>(std::clamp(static_cast<int>(std::lrintf(value)), low, high));
}

}  // namespace

void BlockRow::resize(int64_t cols) {
  scale.resize(static_cast<size_t>(cols / kBlockInputs));
  minimum.resize(scale.size());
  code.resize(static_cast<size_t>(cols));
}

void BlockRow::clear() {
  std::fill(scale.begin(), scale.end(), 0.0f);
  std::fill(minimum.begin(), minimum.end(), 0.0f);
  std::fill(code.begin(), code.end(), int8_t{0});
}

void quantize_row(WeightBlocks blocks, const float* x, int64_t cols, BlockRow& row) {
  row.resize(cols);
  for (int64_t b = 0; b < cols / kBlockInputs; ++b) {
    const float* in = x + b * kBlockInputs;
    int8_t* code = row.code.data() + b * kBlockInputs;
    const auto [low, high] = std::minmax_element(in, in + kBlockInputs);
    float scale = 0, minimum = 0;
    if (blocks == WeightBlocks::kInt8) {
      scale = half_of(std::max(std::abs(*low), std::abs(*high)) / 127);
    } else {
      minimum = half_of(*low);
      scale = half_of((*high - minimum) / 15);
    }
    const float inverse = scale == 0 ? 0 : 1 / scale;
    for (int64_t i = 0; i < kBlockInputs; ++i) {
      code[i] = blocks == WeightBlocks::kInt8 ? nearest(in[i] * inverse, -127, 127)
                                              : nearest((in[i] - minimum) * inverse, 0, 15);
    }
    row.scale[static_cast<size_t>(b)] = scale;
    row.minimum[static_cast<size_t>(b)] = minimum;
  }
}

void pack_rows(WeightBlocks blocks, const BlockRow* rows, int64_t cols, std::byte* target) {
  for (int64_t b = 0; b < cols / kBlockInputs; ++b, target += block_group_bytes(blocks)) {
    for (int64_t r = 0; r < kGroupRows; ++r) {
      const BlockRow& row = rows[r];
      const int8_t* code = row.code.data() + b * kBlockInputs;
      put_half(target + 2 * r, row.scale[static_cast<size_t>(b)]);
      if (blocks == WeightBlocks::kInt8) {
        std::byte* const codes = target + 2 * kGroupRows + 4 * r;
        for (int64_t v = 0; v < 8; ++v) std::memcpy(codes + 32 * v, code + 4 * v, 4);
        continue;
      }
      put_half(target + 2 * (kGroupRows + r), row.minimum[static_cast<size_t>(b)]);
      std::byte* const codes = target + 4 * kGroupRows + 4 * r;
      for (int64_t v = 0; v < 4; ++v) {
        for (int64_t j = 0; j < 4; ++j) {
          codes[32 * v + j] = static_cast<std::byte>(code[4 * v + j] | code[16 + 4 * v + j] << 4);
        }
      }
    }
  }
}

void unpack_row(WeightBlocks blocks, const std::byte* matrix, int64_t cols, int64_t row,
                float* target) {
  const int64_t r = row % kGroupRows;
  const int64_t num_blocks = cols / kBlockInputs;
  const std::byte* at = matrix + row / kGroupRows * num_blocks * block_group_bytes(blocks);
  for (int64_t b = 0; b < num_blocks; ++b, at += block_group_bytes(blocks)) {
    float* out = target + b * kBlockInputs;
    const float scale = get_half(at + 2 * r);
    if (blocks == WeightBlocks::kInt8) {
      const auto* codes = reinterpret_cast<const int8_t*>(at + 2 * kGroupRows + 4 * r);
      for (int64_t i = 0; i < kBlockInputs; ++i) {
        out[i] = scale * static_cast<float>(codes[i / 4 * 32 + i % 4]);
      }
      continue;
    }
    const float minimum = get_half(at + 2 * (kGroupRows + r));
    const auto* codes = reinterpret_cast<const uint8_t*>(at + 4 * kGroupRows + 4 * r);
    for (int64_t i = 0; i < kBlockInputs / 2; ++i) {
      const uint8_t both = codes[i / 4 * 32 + i % 4];
      out[i] = scale * static_cast<float>(both & 15) + minimum;
      out[i + 16] = scale * static_cast<float>(both >> 4) + minimum;
    }
  }
}

}  // namespace clo
