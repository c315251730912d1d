// Products with weights in tiles of codes, against sums in double precision over the same numbers.
#include <cmath>

#include "kernels/gpu_test.h"
#include "kernels/linear/tiles.h"
#include "kernels/norm/norm.h"

namespace clo::kernels {
namespace {

struct Shape {
  int64_t num_outputs, num_inputs;
};

// A random matrix in tiles, and the numbers that it stands for.
struct Matrix {
  Matrix(WeightBlocks kind, const Shape& of, uint64_t seed) : blocks(kind), shape(of) {
    const std::vector<float> values =
        random_floats(shape.num_outputs * shape.num_inputs, seed,
                      1 / std::sqrt(static_cast<float>(shape.num_inputs)));
    std::vector<std::byte> tiles(
        static_cast<size_t>(tiled_bytes(blocks, shape.num_outputs, shape.num_inputs)));
    const int64_t strip = tiled_bytes(blocks, kTileOutputs, shape.num_inputs);
    std::vector<BlockRow> rows(kTileOutputs);
    for (BlockRow& row : rows) row.resize(shape.num_inputs);
    for (int64_t first = 0; first < shape.num_outputs; first += kTileOutputs) {
      for (int64_t r = 0; r < kTileOutputs; ++r) {
        BlockRow& row = rows[static_cast<size_t>(r)];
        if (first + r < shape.num_outputs) {
          quantize_row(blocks, values.data() + (first + r) * shape.num_inputs, shape.num_inputs,
                       row);
        } else {
          row.clear();
        }
      }
      pack_tiles(blocks, rows.data(), shape.num_inputs,
                 tiles.data() + first / kTileOutputs * strip);
    }
    numbers.resize(values.size());
    for (int64_t r = 0; r < shape.num_outputs; ++r) {
      unpack_tiled_row(blocks, tiles.data(), shape.num_inputs, r,
                       numbers.data() + r * shape.num_inputs);
    }
    device = std::make_unique<DeviceArray<std::byte>>(tiles);
  }
  WeightBlocks blocks;
  Shape shape;
  std::vector<float> numbers;  // [num_outputs, num_inputs]
  std::unique_ptr<DeviceArray<std::byte>> device;
};

class TiledTest : public GpuTest {
 protected:
  static int32_t num_multiprocessors() {
    int count = 0;
    CLO_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
  }
  static int64_t shared_limit() {
    int bytes = 0;
    CLO_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return bytes;
  }
  // Rows [first, first + rows) of total, parts summed.
  static std::vector<float> run(const Matrix& m, const DeviceArray<uint16_t>& x, DType type,
                                int32_t first, int32_t rows, int32_t total, int64_t limit,
                                int32_t planned_rows) {
    const SkinnyPlan plan = plan_tiled_linear(m.blocks, m.shape.num_outputs, m.shape.num_inputs,
                                              planned_rows, num_multiprocessors(), limit);
    const int64_t count = total * m.shape.num_outputs;
    const DeviceArray<float> out(plan.splits * count);
    tiled_linear({.blocks = m.blocks,
                  .weight = m.device->data(),
                  .x = x.data(),
                  .out = out.data(),
                  .num_outputs = m.shape.num_outputs,
                  .num_inputs = m.shape.num_inputs,
                  .first_row = first,
                  .rows = rows,
                  .total_rows = total,
                  .type = type},
                 plan, nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
    const std::vector<float> parts = out.download();
    std::vector<float> sum(static_cast<size_t>(rows * m.shape.num_outputs));
    for (int32_t s = 0; s < plan.splits; ++s) {
      for (size_t i = 0; i < sum.size(); ++i) {
        sum[i] += parts[static_cast<size_t>(s * count + first * m.shape.num_outputs) + i];
      }
    }
    return sum;
  }
  static void expect_product(const Matrix& m, DType type, int64_t limit, int32_t planned_rows) {
    constexpr int32_t kTotal = kSkinnyRows + 3;
    const auto bits = to_bits(type, random_floats(kTotal * m.shape.num_inputs, 2));
    const std::vector<float> x = from_bits(type, bits);
    const DeviceArray<uint16_t> device_x(bits);
    std::vector<double> expected;
    for (int64_t r = 0; r < kTotal; ++r) {
      for (int64_t n = 0; n < m.shape.num_outputs; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < m.shape.num_inputs; ++k) {
          sum += static_cast<double>(m.numbers[static_cast<size_t>(n * m.shape.num_inputs + k)]) *
                 static_cast<double>(x[static_cast<size_t>(r * m.shape.num_inputs + k)]);
        }
        expected.push_back(sum);
      }
    }
    for (const auto& [first, rows] :
         {std::pair<int32_t, int32_t>{0, 1}, {0, 8}, {3, 9}, {0, 16}, {16, 3}, {2, 16}}) {
      if (rows > planned_rows) continue;
      const std::vector<float> actual =
          run(m, device_x, type, first, rows, kTotal, limit, planned_rows);
      for (size_t i = 0; i < actual.size(); ++i) {
        const double want = expected[static_cast<size_t>(first * m.shape.num_outputs) + i];
        ASSERT_NEAR(static_cast<double>(actual[i]), want, 5e-5 + 1e-5 * std::abs(want))
            << weight_blocks_name(m.blocks) << " " << m.shape.num_outputs << " x "
            << m.shape.num_inputs << " rows " << rows << " at " << i;
      }
    }
  }
};

TEST_F(TiledTest, MatchesReference) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    for (const int64_t outputs : {1, 15, 17, 64, 100, 512}) {
      for (const int64_t inputs : {32, 96, 256, 288, 704, 3584}) {
        const Matrix matrix(blocks, {outputs, inputs}, 1);
        for (const DType type : kElementTypes) {
          expect_product(matrix, type, shared_limit(), kSkinnyRows);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(TiledTest, MatchesReferenceWithEveryRing) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    const Matrix wide(blocks, {9001, 288}, 2), deep(blocks, {200, 5120}, 3);
    for (const int64_t limit : {shared_limit(), int64_t{99} << 10}) {
      for (const int32_t planned : {8, 16}) {
        expect_product(wide, DType::kBF16, limit, planned);
        expect_product(deep, DType::kF16, limit, planned);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(TiledTest, RowDoesNotDependOnBatch) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    const Matrix m(blocks, {1001, 1536}, 4);
    const DeviceArray<uint16_t> x(to_bits(DType::kBF16, random_floats(16 * 1536, 5)));
    const auto alone = run(m, x, DType::kBF16, 0, 1, 16, shared_limit(), kSkinnyRows);
    for (const int32_t rows : {2, 8, 9, 16}) {
      auto together = run(m, x, DType::kBF16, 0, rows, 16, shared_limit(), kSkinnyRows);
      together.resize(alone.size());
      EXPECT_EQ(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)), 0)
          << rows;
    }
  }
}

TEST_F(TiledTest, ExpandGivesTheNumbersRounded) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    for (const Shape& shape : {Shape{1, 32}, Shape{33, 96}, Shape{128, 704}}) {
      const Matrix m(blocks, shape, 6);
      for (const DType type : kElementTypes) {
        const DeviceArray<uint16_t> out(shape.num_outputs * shape.num_inputs);
        expand_tiles(
            {blocks, m.device->data(), out.data(), shape.num_outputs, shape.num_inputs, type},
            nullptr);
        CLO_CUDA(cudaDeviceSynchronize());
        EXPECT_EQ(out.download(), to_bits(type, m.numbers));
      }
    }
  }
}

TEST_F(TiledTest, TokensAreLookedUp) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    const Matrix m(blocks, {50, 288}, 7);
    const std::vector<int32_t> ids = {0, 49, 17, 16, 15, 3};
    const DeviceArray<int32_t> device_ids(ids);
    const std::vector<float> frequencies(32, 1.0f);
    const DeviceArray<float> device_frequencies(frequencies), x(6 * 288), cosine(6 * 32),
        sine(6 * 32);
    begin_chunk({.ids = device_ids.data(),
                 .table = m.device->data(),
                 .inverse_frequencies = device_frequencies.data(),
                 .x = x.data(),
                 .cosine = cosine.data(),
                 .sine = sine.data(),
                 .width = 288,
                 .rows = 6,
                 .half_dim = 32,
                 .blocks = blocks},
                nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
    const std::vector<float> rows = x.download();
    for (size_t r = 0; r < ids.size(); ++r) {
      for (size_t i = 0; i < 288; ++i) {
        ASSERT_EQ(rows[r * 288 + i], m.numbers[static_cast<size_t>(ids[r]) * 288 + i]);
      }
    }
  }
}

TEST(TiledPlan, RingsFit) {
  for (const WeightBlocks blocks : {WeightBlocks::kInt8, WeightBlocks::kQ4}) {
    for (const int32_t rows : {1, 8, 9, 16}) {
      const SkinnyPlan deep = plan_tiled_linear(blocks, 4096, 14336, rows, 132, 227 << 10);
      const SkinnyPlan small = plan_tiled_linear(blocks, 4096, 14336, rows, 128, 99 << 10);
      EXPECT_LE(deep.shared_bytes, kSkinnyMaxSharedBytes);
      EXPECT_LE(small.shared_bytes, 99 << 10);
      EXPECT_GT(deep.stages, small.stages);
      EXPECT_EQ(deep.split_inputs % tiled_stage_inputs(blocks), 0);
    }
  }
}

}  // namespace
}  // namespace clo::kernels
