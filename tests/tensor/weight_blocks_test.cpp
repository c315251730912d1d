// Blocks: what is packed comes back, codes are the nearest, zeros stay zeros.
#include "tensor/weight_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tensor/weight_tiles.h"

namespace clo {
namespace {

std::vector<float> normals(int64_t count, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

float number(const BlockRow& row, int64_t i) {
  const auto b = static_cast<size_t>(i / kBlockInputs);
  return row.scale[b] * static_cast<float>(row.code[static_cast<size_t>(i)]) + row.minimum[b];
}

TEST(WeightBlocks, SizesOfAMatrix) {
  EXPECT_EQ(weight_bytes(WeightBlocks::kNone, DType::kBF16, 9, 64), 9 * 64 * 2);
  EXPECT_EQ(weight_bytes(WeightBlocks::kInt8, DType::kBF16, 9, 64), 2 * 2 * (16 + 256));
  EXPECT_EQ(weight_bytes(WeightBlocks::kQ4, DType::kBF16, 8, 32), 32 + 128);
}

TEST(WeightBlocks, WhatIsPackedComesBack) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    for (const int64_t cols : {32, 64, 288}) {
      const int64_t rows = 16;
      std::vector<std::byte> matrix(
          static_cast<size_t>(weight_bytes(blocks, DType::kF32, rows, cols)), std::byte{0xFF});
      std::vector<BlockRow> packed(static_cast<size_t>(rows));
      const std::vector<float> values = normals(rows * cols, 3);
      for (int64_t r = 0; r < rows; ++r) {
        quantize_row(blocks, values.data() + r * cols, cols, packed[static_cast<size_t>(r)]);
      }
      const int64_t group = cols / kBlockInputs * block_group_bytes(blocks);
      for (int64_t g = 0; g < 2; ++g) {
        pack_rows(blocks, packed.data() + g * kGroupRows, cols, matrix.data() + g * group);
      }
      std::vector<float> row(static_cast<size_t>(cols));
      for (int64_t r = 0; r < rows; ++r) {
        unpack_row(blocks, matrix.data(), cols, r, row.data());
        for (int64_t i = 0; i < cols; ++i) {
          ASSERT_EQ(row[static_cast<size_t>(i)], number(packed[static_cast<size_t>(r)], i))
              << weight_blocks_name(blocks) << " row " << r << " column " << i;
        }
      }
    }
  }
}

// What a GPU reads: every place of a tile once, and the same numbers.
TEST(WeightTiles, WhatIsPackedComesBack) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    for (const int64_t cols : {32, 64, 96, 288}) {
      std::vector<BlockRow> rows(kTileOutputs);
      const std::vector<float> values = normals(kTileOutputs * cols, 3);
      for (int64_t r = 0; r < kTileOutputs; ++r) {
        quantize_row(blocks, values.data() + r * cols, cols, rows[static_cast<size_t>(r)]);
      }
      const auto bytes = static_cast<size_t>(tiled_bytes(blocks, 2 * kTileOutputs, cols));
      std::vector<std::byte> matrix(bytes, std::byte{0xFF});
      for (const size_t half : {size_t{0}, bytes / 2}) {
        pack_tiles(blocks, rows.data(), cols, matrix.data() + half);
      }
      std::vector<float> row(static_cast<size_t>(cols));
      for (int64_t r = 0; r < 2 * kTileOutputs; ++r) {
        unpack_tiled_row(blocks, matrix.data(), cols, r, row.data());
        for (int64_t i = 0; i < cols; ++i) {
          ASSERT_EQ(row[static_cast<size_t>(i)],
                    number(rows[static_cast<size_t>(r % kTileOutputs)], i))
              << weight_blocks_name(blocks) << " row " << r << " column " << i;
        }
      }
    }
  }
  EXPECT_EQ(tiled_bytes(WeightBlocks::kInt8, 17, 33), 2 * 2 * 544);
  EXPECT_EQ(tiled_bytes(WeightBlocks::kQ4, 16, 65), 2 * 640);
}

TEST(WeightBlocks, CodesAreTheNearest) {
  const std::vector<float> values = normals(4096, 5);
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    BlockRow row;
    quantize_row(blocks, values.data(), 4096, row);
    for (int64_t i = 0; i < 4096; ++i) {
      const float step = row.scale[static_cast<size_t>(i / kBlockInputs)];
      // Half a step, and what rounding the scale to f16 moved the ends of the range.
      const float bound =
          0.5f * step + (blocks == WeightBlocks::kInt8 ? 127 : 15) * step * 0x1p-10f;
      EXPECT_LE(std::abs(values[static_cast<size_t>(i)] - number(row, i)), bound);
    }
  }
}

TEST(WeightBlocks, ZerosAndEqualNumbers) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    for (const float value : {0.0f, 0.25f, -3.0f}) {
      const std::vector<float> values(64, value);
      BlockRow row;
      quantize_row(blocks, values.data(), 64, row);
      // 127 scales of f16 are the number up to f16's rounding.
      for (int64_t i = 0; i < 64; ++i) {
        EXPECT_NEAR(number(row, i), value, std::abs(value) * 0x1p-11f);
      }
    }
    BlockRow row;
    row.resize(32);
    row.scale[0] = 1;
    row.code[7] = 3;
    row.clear();
    for (int64_t i = 0; i < 32; ++i) EXPECT_EQ(number(row, i), 0);
  }
}

}  // namespace
}  // namespace clo
