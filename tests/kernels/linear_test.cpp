#include "kernels/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "kernels/gpu_test.h"

namespace clo::kernels {
namespace {

constexpr int64_t kSharedLimit = int64_t{227} << 10;

struct Shape {
  int64_t num_outputs, num_inputs;
  DType type = DType::kBF16;
};

int32_t num_multiprocessors() {
  int count = 0;
  CLO_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}
int64_t shared_limit() {
  int bytes = 0;
  CLO_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  return bytes;
}

// The result with parts added in order, [rows][num_outputs].
std::vector<float> run_skinny(const DeviceArray<uint16_t>& weight, const DeviceArray<uint16_t>& x,
                              const Shape& shape, int32_t rows, int32_t max_splits, int64_t limit) {
  const SkinnyPlan plan = plan_skinny_linear(shape.num_outputs, shape.num_inputs, rows,
                                             num_multiprocessors(), limit, max_splits);
  const int64_t count = rows * shape.num_outputs;
  DeviceArray<float> out(plan.splits * count);
  skinny_linear({.weight = weight.data(),
                 .x = x.data(),
                 .out = out.data(),
                 .num_outputs = shape.num_outputs,
                 .num_inputs = shape.num_inputs,
                 .rows = rows,
                 .type = shape.type},
                plan, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  const std::vector<float> parts = out.download();
  std::vector<float> sum(static_cast<size_t>(count));
  for (int32_t s = 0; s < plan.splits; ++s) {
    for (int64_t i = 0; i < count; ++i) {
      sum[static_cast<size_t>(i)] += parts[static_cast<size_t>(s * count + i)];
    }
  }
  return sum;
}

TEST(SkinnyPlan, CutsModelShapes) {
  struct Case {
    const char* what;
    Shape shape;
    int32_t max_splits;
    double least_balance;
  };
  const Case cases[] = {
      {"8B qkv", {6144, 4096}, 8, 0.9},       {"8B o", {4096, 4096}, 8, 0.9},
      {"8B gate, up", {28672, 4096}, 8, 0.9}, {"8B down", {4096, 14336}, 8, 0.9},
      {"8B logits", {128256, 4096}, 1, 0.9},  {"7B qkv", {4608, 3584}, 8, 0.9},
      {"7B o", {3584, 3584}, 8, 0.8},         {"7B gate, up", {37888, 3584}, 8, 0.9},
      {"7B down", {3584, 18944}, 8, 0.9},     {"7B logits", {152064, 3584}, 1, 0.9},
      {"recall qkv", {512, 256}, 8, 0},       {"recall o", {256, 256}, 8, 0},
      {"recall gate, up", {1408, 256}, 8, 0}, {"recall down", {256, 704}, 8, 0},
      {"recall logits", {4096, 256}, 1, 0}};
  for (const Case& c : cases) {
    const auto [outputs, inputs, type] = c.shape;
    (void)type;
    const SkinnyPlan plan =
        plan_skinny_linear(outputs, inputs, 16, 132, kSharedLimit, c.max_splits);
    const double balance = skinny_balance(plan, outputs, inputs, 132);
    std::printf("%-16s %6lld x %5lld: %4lld items, balance %.3f, %s\n", c.what,
                static_cast<long long>(outputs), static_cast<long long>(inputs),
                static_cast<long long>(skinny_items(plan, outputs)), balance,
                describe(plan).c_str());
    EXPECT_GE(balance, c.least_balance);
    EXPECT_LE(plan.splits, c.max_splits);
    EXPECT_LE(plan.shared_bytes, kSkinnyMaxSharedBytes);
  }
}

TEST(SkinnyPlan, SplitsAreWholeStagesAndNoneIsEmpty) {
  for (const int64_t outputs : {1, 64, 65, 1000, 4608, 100000}) {
    for (const int64_t inputs : {8, 24, 128, 136, 704, 3584, 18944}) {
      for (const int32_t max_splits : {1, 3, 8}) {
        const SkinnyPlan plan =
            plan_skinny_linear(outputs, inputs, 1, 132, kSharedLimit, max_splits);
        EXPECT_EQ(plan.split_inputs % kSkinnyStageInputs, 0);
        EXPECT_LT((plan.splits - 1) * plan.split_inputs, inputs);
        EXPECT_GE(plan.splits * plan.split_inputs, inputs);
        EXPECT_LE(plan.splits, max_splits);
        EXPECT_GE(plan.grid, 1);
        EXPECT_LE(plan.grid, skinny_items(plan, outputs));
      }
    }
  }
}

TEST(SkinnyPlan, SplitsDoNotDependOnRows) {
  for (const Shape& shape : {Shape{4608, 3584}, Shape{256, 704}, Shape{28672, 4096}}) {
    const SkinnyPlan one =
        plan_skinny_linear(shape.num_outputs, shape.num_inputs, 1, 132, kSharedLimit);
    for (int32_t rows = 2; rows <= kSkinnyRows; ++rows) {
      const SkinnyPlan plan =
          plan_skinny_linear(shape.num_outputs, shape.num_inputs, rows, 132, kSharedLimit);
      EXPECT_EQ(plan.splits, one.splits);
      EXPECT_EQ(plan.split_inputs, one.split_inputs);
    }
  }
}

TEST(SkinnyPlan, FitsIntoLittleSharedMemory) {
  const SkinnyPlan plan = plan_skinny_linear(4096, 4096, 16, 128, int64_t{99} << 10);
  EXPECT_EQ(plan.stages, 4);
  EXPECT_LE(plan.shared_bytes, int64_t{99} << 10);
}

class SkinnyLinearTest : public GpuTest {};

void expect_matches_reference(const Shape& shape, int32_t max_splits, int64_t limit) {
  const auto weight_bits =
      to_bits(shape.type, random_floats(shape.num_outputs * shape.num_inputs, 1,
                                        1 / std::sqrt(static_cast<float>(shape.num_inputs))));
  const auto x_bits = to_bits(shape.type, random_floats(kSkinnyRows * shape.num_inputs, 2));
  const std::vector<float> weight = from_bits(shape.type, weight_bits),
                           x = from_bits(shape.type, x_bits);
  std::vector<double> expected;  // [kSkinnyRows][num_outputs]
  for (int64_t r = 0; r < kSkinnyRows; ++r) {
    for (int64_t n = 0; n < shape.num_outputs; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < shape.num_inputs; ++k) {
        sum += static_cast<double>(weight[static_cast<size_t>(n * shape.num_inputs + k)]) *
               static_cast<double>(x[static_cast<size_t>(r * shape.num_inputs + k)]);
      }
      expected.push_back(sum);
    }
  }
  const DeviceArray<uint16_t> device_weight(weight_bits), device_x(x_bits);
  for (const int32_t rows : {1, 2, 3, 7, 8, 9, 15, 16}) {
    const std::vector<float> actual =
        run_skinny(device_weight, device_x, shape, rows, max_splits, limit);
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(actual[i]), expected[i], 5e-5 + 5e-6 * std::abs(expected[i]))
          << shape.num_outputs << " x " << shape.num_inputs << ", rows " << rows << ", at " << i;
    }
  }
}

TEST_F(SkinnyLinearTest, MatchesReference) {
  for (const int64_t outputs : {1, 15, 17, 64, 100, 512}) {
    for (const int64_t inputs : {8, 24, 128, 256, 704, 3584}) {
      for (const DType type : kElementTypes) {
        expect_matches_reference({outputs, inputs, type}, kSkinnyMaxSplits, shared_limit());
      }
    }
  }
}

// One block reads many items; parts have different lengths.
TEST_F(SkinnyLinearTest, MatchesReferenceOverManyTiles) {
  expect_matches_reference({9001, 264}, 1, shared_limit());
  expect_matches_reference({20000, 264}, kSkinnyMaxSplits, shared_limit());
  expect_matches_reference({1408, 1288}, kSkinnyMaxSplits, shared_limit());
}

TEST_F(SkinnyLinearTest, MatchesReferenceWithSmallRing) {
  expect_matches_reference({9001, 264}, 1, int64_t{99} << 10);
  expect_matches_reference({9001, 264, DType::kF16}, 1, int64_t{99} << 10);
  expect_matches_reference({100, 3584}, kSkinnyMaxSplits, int64_t{99} << 10);
}

TEST_F(SkinnyLinearTest, RowDoesNotDependOnBatch) {
  for (const Shape& shape : {Shape{512, 256}, Shape{1001, 3584}, Shape{4608, 3584}}) {
    const DeviceArray<uint16_t> weight(
        to_bits(shape.type, random_floats(shape.num_outputs * shape.num_inputs, 3)));
    const DeviceArray<uint16_t> x(
        to_bits(shape.type, random_floats(kSkinnyRows * shape.num_inputs, 4)));
    const std::vector<float> alone =
        run_skinny(weight, x, shape, 1, kSkinnyMaxSplits, shared_limit());
    for (const int32_t rows : {2, 8, 9, 16}) {
      std::vector<float> together =
          run_skinny(weight, x, shape, rows, kSkinnyMaxSplits, shared_limit());
      together.resize(alone.size());
      EXPECT_EQ(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)), 0)
          << rows;
    }
  }
}

// A row's values, NaN included, stay in that row.
TEST_F(SkinnyLinearTest, RowsDoNotMix) {
  const Shape shape{100, 264};
  std::vector<float> x = random_floats(kSkinnyRows * shape.num_inputs, 5);
  for (int64_t k = 0; k < shape.num_inputs; ++k)
    x[static_cast<size_t>(3 * shape.num_inputs + k)] = NAN;
  const DeviceArray<uint16_t> weight(
      to_bits(shape.type, random_floats(shape.num_outputs * shape.num_inputs, 6)));
  const std::vector<float> out = run_skinny(weight, DeviceArray<uint16_t>(to_bits(shape.type, x)),
                                            shape, 16, kSkinnyMaxSplits, shared_limit());
  for (int64_t r = 0; r < 16; ++r) {
    for (int64_t n = 0; n < shape.num_outputs; ++n) {
      EXPECT_EQ(std::isnan(out[static_cast<size_t>(r * shape.num_outputs + n)]), r == 3);
    }
  }
}

}  // namespace
}  // namespace clo::kernels
