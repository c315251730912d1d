// Operations on activations: embedding, norm, linear, rotation, gate.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cstdlib>
#include <limits>
#include <string_view>

#include "reference/cpu_ops.h"
#include "scene.h"

namespace clo {
namespace {

// A weight matrix in memory of its type, and what its elements are.
struct Weight {
  Weight(DType of_type, int64_t num_rows, int64_t num_cols, Random& random)
      : type(of_type), rows(num_rows), cols(num_cols), bytes(rows * cols * dtype_bytes(type)) {
    const std::vector<float> raw = random.normals(rows * cols);
    convert_from_f32(type, raw.data(), bytes.data(), rows * cols);
    elements.resize(raw.size());
    convert_to_f32(type, bytes.data(), elements.data(), rows * cols);
  }
  WeightView view() const { return {bytes.data(), type, rows, cols}; }
  DType type;
  int64_t rows, cols;
  Bytes bytes;
  std::vector<float> elements;
};

struct LinearCase {
  int64_t num_rows = 1, out_stride = 0;
  bool bias = false, accumulate = false;
};

std::vector<float> run_linear(int threads, const Weight& weight, const std::vector<float>& x,
                              const std::vector<float>& bias, const std::vector<float>& before,
                              const LinearCase& c) {
  CpuOps ops(threads);
  std::vector<float> out = before;
  ops.linear({weight.view(), c.bias ? bias.data() : nullptr, x.data(), out.data(), c.num_rows,
              c.out_stride, c.accumulate});
  return out;
}

RC_GTEST_PROP(Linear, EqualsNaiveSums, ()) {
  Random random(*rc::gen::arbitrary<uint64_t>());
  LinearCase c;
  c.num_rows = *rc::gen::element<int64_t>(1, 2, 3, 5, 8, 16, 17, 40);
  const Weight weight(*rc::gen::element(DType::kF32, DType::kF16, DType::kBF16),
                      *rc::gen::element<int64_t>(1, 2, 7, 8, 9, 24, 33, 130),
                      *rc::gen::element<int64_t>(1, 7, 8, 15, 33, 64, 100, 257), random);
  c.out_stride = weight.rows + *rc::gen::element<int64_t>(0, 3);
  c.bias = *rc::gen::arbitrary<bool>();
  c.accumulate = *rc::gen::arbitrary<bool>();
  const std::vector<float> x = random.normals(c.num_rows * weight.cols);
  const std::vector<float> bias = random.normals(weight.rows);
  const std::vector<float> before = random.normals(c.num_rows * c.out_stride);

  const std::vector<float> out = run_linear(1, weight, x, bias, before, c);
  for (int64_t r = 0; r < c.num_rows; ++r) {
    for (int64_t n = 0; n < c.out_stride; ++n) {
      const float found = out[static_cast<size_t>(r * c.out_stride + n)];
      const float old = before[static_cast<size_t>(r * c.out_stride + n)];
      if (n >= weight.rows) {
        RC_ASSERT(found == old);  // between the end of a row and the next one
        continue;
      }
      double sum = 0, magnitude = 0;
      const auto add = [&](double term) {
        sum += term;
        magnitude += std::abs(term);
      };
      for (int64_t i = 0; i < weight.cols; ++i) {
        add(static_cast<double>(weight.elements[static_cast<size_t>(n * weight.cols + i)]) *
            x[static_cast<size_t>(r * weight.cols + i)]);
      }
      if (c.bias) add(bias[static_cast<size_t>(n)]);
      if (c.accumulate) add(old);
      // An f32 sum of m terms in any order errs by at most m x 2^-24 x the sum of magnitudes.
      RC_ASSERT(std::abs(found - sum) <=
                static_cast<double>(weight.cols + 4) * 0x1p-24 * magnitude);
    }
  }
  // Small batches: no bit depends on the threads, nor a row on the rest of the batch.
  if (c.num_rows > 16) return;
  RC_ASSERT(same_bits(out, run_linear(2, weight, x, bias, before, c)));
  for (int64_t r = 0; r < c.num_rows; ++r) {
    LinearCase alone = c;
    alone.num_rows = 1;
    const auto part = [&](const std::vector<float>& all, int64_t width) {
      return std::vector<float>(all.begin() + r * width, all.begin() + (r + 1) * width);
    };
    RC_ASSERT(same_bits(part(out, c.out_stride), run_linear(2, weight, part(x, weight.cols), bias,
                                                            part(before, c.out_stride), alone)));
  }
}

TEST(Linear, RowsAreTheSameInEveryBatchUpToSixteen) {
  Random random(1);
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    // Large enough to be cut among threads, odd in both extents.
    const Weight weight(type, 133, 259, random);
    const std::vector<float> x = random.normals(16 * weight.cols);
    const std::vector<float> none(static_cast<size_t>(16 * weight.rows), 0.0f);
    const std::vector<float> all =
        run_linear(2, weight, x, {}, none, {16, weight.rows, false, false});
    for (int64_t rows = 1; rows < 16; ++rows) {
      const std::vector<float> some =
          run_linear(1, weight, x, {}, none, {rows, weight.rows, false, false});
      ASSERT_TRUE(std::equal(some.begin(), some.begin() + rows * weight.rows, all.begin())) << rows;
    }
  }
}

TEST(Embed, WidensTheRowsNamed) {
  Random random(2);
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Weight table(type, 11, 37, random);
    const std::vector<int32_t> ids = {10, 0, 3, 3, 7};
    std::vector<float> out(ids.size() * 37);
    CpuOps(1).embed({table.view(), ids.data(), out.data(), 5});
    for (size_t i = 0; i < ids.size(); ++i) {
      for (size_t c = 0; c < 37; ++c) {
        ASSERT_EQ(out[i * 37 + c], table.elements[static_cast<size_t>(ids[i]) * 37 + c]);
      }
    }
  }
}

RC_GTEST_PROP(RmsNorm, EqualsTheDefinition, ()) {
  Random random(*rc::gen::arbitrary<uint64_t>());
  const auto width = *rc::gen::element<int64_t>(1, 7, 8, 9, 64, 100, 257, 1024);
  const auto rows = *rc::gen::element<int64_t>(1, 2, 31, 32, 40);
  const int64_t stride = width + *rc::gen::element<int64_t>(0, 5);
  const float size = *rc::gen::element(1e-3f, 1.0f, 1e3f);
  const float epsilon = *rc::gen::element(0.0f, 1e-6f, 1e-5f);
  std::vector<float> x = random.normals(rows * stride);
  for (float& value : x) value *= size;
  const std::vector<float> weight = random.normals(width);
  std::vector<float> out = x, in_place = x, two_threads = x;
  CpuOps(1).rms_norm({x.data(), weight.data(), out.data(), rows, width, stride, epsilon});
  CpuOps(1).rms_norm(
      {in_place.data(), weight.data(), in_place.data(), rows, width, stride, epsilon});
  CpuOps(2).rms_norm({x.data(), weight.data(), two_threads.data(), rows, width, stride, epsilon});
  RC_ASSERT(same_bits(out, in_place));
  RC_ASSERT(same_bits(out, two_threads));
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double v = x[static_cast<size_t>(r * stride + i)];
      sum += v * v;
    }
    const double scale = 1 / std::sqrt(sum / static_cast<double>(width) + epsilon);
    for (int64_t i = 0; i < stride; ++i) {
      const auto at = static_cast<size_t>(r * stride + i);
      if (i >= width) {
        RC_ASSERT(out[at] == x[at]);
        continue;
      }
      const double expected = x[at] * scale * weight[static_cast<size_t>(i)];
      // Terms are positive: the sum's relative error is at most width/8 x 2^-24, halved by the
      // root.
      RC_ASSERT(std::abs(out[at] - expected) <= 1e-5 * std::abs(expected) + 1e-30);
    }
  }
}

RC_GTEST_PROP(Rotate, EqualsTheDefinition, ()) {
  Random random(*rc::gen::arbitrary<uint64_t>());
  const auto dim = *rc::gen::element<int32_t>(16, 32, 64, 80, 128);
  const auto heads = *rc::gen::inRange(1, 5);
  const auto rows = *rc::gen::element<int64_t>(1, 2, 15, 16, 33);
  const int64_t stride = int64_t{heads} * dim + *rc::gen::element<int64_t>(0, 2 * dim);
  const bool norm = *rc::gen::arbitrary<bool>();
  const float factor = *rc::gen::element(1.0f, 1.25f);
  const std::vector<float> before = random.normals(rows * stride);
  const std::vector<float> norm_weight = random.normals(dim);
  std::vector<float> frequencies;
  for (int32_t i = 0; i < dim / 2; ++i) frequencies.push_back(std::pow(1e4f, -2.0f * i / dim));
  std::vector<int64_t> positions;
  for (int64_t r = 0; r < rows; ++r) positions.push_back(random.below(r % 2 == 0 ? 300 : 2000000));
  const auto run = [&](int threads) {
    std::vector<float> x = before;
    std::vector<float> cosine(static_cast<size_t>(rows) * (dim / 2)), sine(cosine.size());
    CpuOps(threads).rotary_table(
        {positions.data(), frequencies.data(), cosine.data(), sine.data(), factor, rows, dim / 2});
    RotateParams params;
    params.x = x.data();
    params.cosine = cosine.data();
    params.sine = sine.data();
    params.norm_weight = norm ? norm_weight.data() : nullptr;
    params.norm_epsilon = 1e-6f;
    params.num_rows = rows;
    params.stride = stride;
    params.num_heads = heads;
    params.head_dim = dim;
    CpuOps(threads).rotate(params);
    return x;
  };
  const std::vector<float> out = run(1);
  RC_ASSERT(same_bits(out, run(2)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = int64_t{heads} * dim; i < stride; ++i) {
      RC_ASSERT(out[static_cast<size_t>(r * stride + i)] ==
                before[static_cast<size_t>(r * stride + i)]);  // what follows the heads stays
    }
    for (int32_t h = 0; h < heads; ++h) {
      const auto at = static_cast<size_t>(r * stride + int64_t{h} * dim);
      std::vector<double> x(before.begin() + at, before.begin() + at + dim);
      if (norm) {
        double sum = 0;
        for (const double v : x) sum += v * v;
        for (int32_t i = 0; i < dim; ++i) x[i] *= norm_weight[i] / std::sqrt(sum / dim + 1e-6);
      }
      for (int32_t i = 0; i < dim / 2; ++i) {
        // The angle itself is an f32 product, as in the checkpoints' reference implementation.
        const double angle = static_cast<float>(positions[r]) * frequencies[i];
        const double a = x[i], b = x[i + dim / 2];
        const double c = std::cos(angle) * factor, s = std::sin(angle) * factor;
        // A handful of f32 roundings of values of size |a| + |b|; the norm's sum adds a few more.
        const double bound = 1e-5 * (std::abs(a) + std::abs(b));
        RC_ASSERT(std::abs(out[at + i] - (a * c - b * s)) <= bound);
        RC_ASSERT(std::abs(out[at + i + dim / 2] - (b * c + a * s)) <= bound);
      }
    }
  }
}

TEST(GatedSilu, EqualsTheDefinitionForAnyFloat) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> gates = {
      0.0f,   -0.0f,  1e-30f,  -1e-30f, 0.5f,
      -0.5f,  3.0f,   -3.0f,   20.0f,   -20.0f,
      86.9f,  -86.9f, 87.1f,   -87.1f,  88.5f,
      -88.5f, 103.0f, -103.0f, 1e10f,   -1e10f,
      3e38f,  -3e38f, kInf,    -kInf,   std::numeric_limits<float>::quiet_NaN(),
      1.0f,   -1.0f,  2.0f,    -2.0f};
  Random random(3);
  // Every gate at every place of a vector and in the rest that fills none.
  for (int64_t width = 1; width <= 20; ++width) {
    for (size_t first = 0; first < gates.size(); ++first) {
      std::vector<float> x(static_cast<size_t>(2 * width)), out(static_cast<size_t>(width));
      for (int64_t i = 0; i < width; ++i) {
        x[i] = gates[(first + static_cast<size_t>(i)) % gates.size()];
        x[width + i] = random.normal();
      }
      CpuOps(1).gated_silu({x.data(), out.data(), 1, width});
      for (int64_t i = 0; i < width; ++i) {
        const double g = x[i];
        const double expected = g / (1 + std::exp(-g)) * x[width + i];
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(out[i])) << "gate " << x[i] << " gave " << out[i];
        } else if (std::abs(expected) > std::numeric_limits<float>::max()) {
          // Beyond f32: infinite here, large and finite in double.
          ASSERT_EQ(out[i], std::copysign(kInf, static_cast<float>(expected)));
        } else {
          // exp is good to 3e-7 and 0 below -87, where the true result is below 1e-35.
          ASSERT_NEAR(out[i], expected, 2e-6 * std::abs(expected) + 1e-34) << "gate " << x[i];
        }
      }
    }
  }
}

TEST(GatedSilu, RowsAreIndependentAndThreadsDoNotMatter) {
  Random random(4);
  const int64_t rows = 40, width = 37;
  std::vector<float> x = random.normals(rows * 2 * width);
  x[5 * 2 * width + 3] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> one(static_cast<size_t>(rows * width)), two = one;
  CpuOps(1).gated_silu({x.data(), one.data(), rows, width});
  CpuOps(2).gated_silu({x.data(), two.data(), rows, width});
  EXPECT_TRUE(same_bits(one, two));
  for (int64_t i = 0; i < rows * width; ++i) EXPECT_EQ(std::isnan(one[i]), i == 5 * width + 3) << i;
}

TEST(CpuOps, SaysWhichLoopsAndHowManyThreadsItUses) {
  const char* wanted = std::getenv("CLO_SIMD");
  const bool baseline = wanted != nullptr && std::string_view(wanted) == "baseline";
  EXPECT_EQ(CpuOps(1).description(), std::string("cpu (") + simd_table().name + ", 1 thread)");
  EXPECT_NE(CpuOps(2).description().find("2 threads"), std::string::npos);
  if (baseline) {
    EXPECT_EQ(std::string_view(simd_table().name), "baseline");
  }
}

TEST(CpuOps, NamesTheShapesItDoesNotSupport) {
  KvShape shape{1, 8, 2, 128, DType::kBF16, 128};
  EXPECT_TRUE(CpuOps::supports(shape));
  for (const int32_t dim : {8, 24, 100, 528, 1024}) {
    shape.head_dim = dim;
    const auto refused = CpuOps::supports(shape);
    ASSERT_FALSE(refused) << dim;
    EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(refused.error().message.find("head_dim " + std::to_string(dim)), std::string::npos);
  }
  shape.head_dim = 512;
  EXPECT_TRUE(CpuOps::supports(shape));
  shape.num_q_heads = 130;
  const auto refused = CpuOps::supports(shape);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(refused.error().message.find("65 query heads"), std::string::npos);
}

}  // namespace
}  // namespace clo
