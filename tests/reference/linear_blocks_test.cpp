// Products with weights in blocks, of every instruction set that this processor has, against naive
// sums over the same numbers.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "reference/cpu_ops.h"
#include "scene.h"
#include "simd_tables.h"

namespace clo {
namespace {

struct BlockMatrix {
  BlockMatrix(WeightBlocks of_blocks, int64_t num_rows, int64_t num_cols, Random& random)
      : blocks(of_blocks),
        rows(num_rows),
        cols(num_cols),
        bytes(weight_bytes(blocks, DType::kF32, rows, cols)),
        elements(static_cast<size_t>(rows * cols)) {
    const std::vector<float> raw = random.normals(rows * cols);
    const int64_t group_bytes = cols / kBlockInputs * block_group_bytes(blocks);
    std::vector<BlockRow> group(kGroupRows);
    for (int64_t first = 0; first < rows; first += kGroupRows) {
      for (int64_t r = 0; r < kGroupRows; ++r) {
        BlockRow& row = group[static_cast<size_t>(r)];
        row.resize(cols);
        row.clear();
        if (first + r < rows) quantize_row(blocks, raw.data() + (first + r) * cols, cols, row);
      }
      pack_rows(blocks, group.data(), cols, bytes.data() + first / kGroupRows * group_bytes);
    }
    for (int64_t r = 0; r < rows; ++r) {
      unpack_row(blocks, bytes.data(), cols, r, elements.data() + r * cols);
    }
  }
  WeightView view() const { return {bytes.data(), DType::kBF16, rows, cols, blocks}; }
  WeightBlocks blocks;
  int64_t rows, cols;
  Bytes bytes;
  std::vector<float> elements;
};

TEST(Activations, BecomeTheNearestCodes) {
  Random random(4);
  for (const SimdTable* table : tables()) {
    SCOPED_TRACE(table->name);
    std::vector<float> x = random.normals(96);
    std::fill(x.begin() + 32, x.begin() + 64, 0.0f);
    std::vector<ActivationBlock> blocks(3);
    table->quantize_activations(x.data(), 96, blocks.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const ActivationBlock& block = blocks[i / 32];
      EXPECT_LE(std::abs(x[i] - block.scale * static_cast<float>(block.code[i % 32])),
                0.501f * block.scale);
    }
    for (const ActivationBlock& block : blocks) {
      int sum = 0;
      for (const int8_t code : block.code) sum += code;
      EXPECT_EQ(block.sum, block.scale * static_cast<float>(sum));
    }
    EXPECT_EQ(blocks[1].scale, 0);
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      x[3] = bad;
      table->quantize_activations(x.data(), 32, blocks.data());
      EXPECT_TRUE(std::isnan(blocks[0].scale));
    }
  }
}

TEST(LinearBlocks, EveryInstructionSetEqualsNaiveSums) {
  Random random(5);
  for (const SimdTable* table : tables()) {
    for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
      for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 32},
                                       {8, 64},
                                       {9, 32},
                                       {31, 96},
                                       {133, 576},
                                       {16, 4096}}) {
        const BlockMatrix weight(blocks, rows, cols, random);
        for (const int64_t batch : {1, 2, 3, 4, 5, 7, 16}) {
          SCOPED_TRACE(std::string(table->name) + " " + std::string(weight_blocks_name(blocks)) +
                       " " + std::to_string(rows) + " x " + std::to_string(cols) + " batch " +
                       std::to_string(batch));
          const std::vector<float> x = random.normals(batch * cols), bias = random.normals(rows);
          std::vector<ActivationBlock> codes(static_cast<size_t>(batch * cols / kBlockInputs));
          for (int64_t b = 0; b < batch; ++b) {
            table->quantize_activations(x.data() + b * cols, cols,
                                        codes.data() + b * cols / kBlockInputs);
          }
          const int64_t stride = rows + 3;
          std::vector<float> out(static_cast<size_t>(batch * stride), 7.0f);
          BlockProduct product = {blocks, weight.bytes.data(), rows,       cols,   codes.data(),
                                  batch,  bias.data(),         out.data(), stride, true};
          table->linear_blocks(product, 0, (rows + 7) / 8);
          for (int64_t b = 0; b < batch; ++b) {
            for (int64_t n = 0; n < stride; ++n) {
              const float found = out[static_cast<size_t>(b * stride + n)];
              if (n >= rows) {
                ASSERT_EQ(found, 7.0f);
                continue;
              }
              double sum = 7.0 + static_cast<double>(bias[static_cast<size_t>(n)]);
              double magnitude = std::abs(sum) + 7;
              for (int64_t i = 0; i < cols; ++i) {
                const ActivationBlock& block =
                    codes[static_cast<size_t>((b * cols + i) / kBlockInputs)];
                const double term =
                    static_cast<double>(weight.elements[static_cast<size_t>(n * cols + i)]) *
                    static_cast<double>(block.scale) * block.code[i % kBlockInputs];
                sum += term;
                magnitude += std::abs(term);
              }
              // Exact integers within a block; two roundings a block beside them, and a weight of
              // q4 is a sum whose own rounding the naive element has.
              ASSERT_LE(std::abs(found - sum),
                        static_cast<double>(cols / kBlockInputs + 8) * 0x1p-22 * magnitude);
            }
          }
        }
      }
    }
  }
}

// No bit depends on the threads, nor a row on the rest of the batch; many rows go through f32.
TEST(LinearBlocks, RowsAreTheSameInEveryBatch) {
  Random random(6);
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    const BlockMatrix weight(blocks, 1200, 320, random);
    const std::vector<float> x = random.normals(40 * weight.cols);
    const auto run = [&](int threads, int64_t first, int64_t count) {
      CpuOps ops(threads);
      std::vector<float> out(static_cast<size_t>(count * weight.rows));
      ops.linear({weight.view(), nullptr, x.data() + first * weight.cols, out.data(), count,
                  weight.rows, false});
      return out;
    };
    const std::vector<float> all = run(1, 0, 16);
    EXPECT_EQ(all, run(3, 0, 16));
    for (const int64_t row : {0, 5, 15}) {
      const auto at = all.begin() + row * weight.rows;
      EXPECT_EQ(std::vector<float>(at, at + weight.rows), run(2, row, 1)) << row;
    }
    const std::vector<float> many = run(2, 0, 40);
    for (int64_t r = 0; r < 40; ++r) {
      for (int64_t n = 0; n < weight.rows; ++n) {
        double sum = 0, magnitude = 0;
        for (int64_t i = 0; i < weight.cols; ++i) {
          const double term =
              static_cast<double>(weight.elements[static_cast<size_t>(n * weight.cols + i)]) *
              static_cast<double>(x[static_cast<size_t>(r * weight.cols + i)]);
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_LE(std::abs(many[static_cast<size_t>(r * weight.rows + n)] - sum),
                  static_cast<double>(weight.cols) * 0x1p-24 * magnitude);
      }
    }
  }
}

TEST(LinearBlocks, EmbeddingRowsAreTheNumbers) {
  Random random(7);
  const BlockMatrix table(WeightBlocks::kInt8, 45, 64, random);
  CpuOps ops(1);
  const std::vector<int32_t> ids = {0, 44, 8, 7, 8};
  std::vector<float> out(ids.size() * 64);
  ops.embed({table.view(), ids.data(), out.data(), std::ssize(ids)});
  for (size_t t = 0; t < ids.size(); ++t) {
    for (size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(out[t * 64 + i], table.elements[static_cast<size_t>(ids[t]) * 64 + i]);
    }
  }
}

}  // namespace
}  // namespace clo
