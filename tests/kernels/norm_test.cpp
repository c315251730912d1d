#include "kernels/norm/norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/gpu_test.h"

namespace clo::kernels {
namespace {

// Relative: half a unit and the rounding of f32 sums.
constexpr double step_of(DType type) { return type == DType::kBF16 ? 1.0 / 256 : 1.0 / 2000; }
// Below this f16 has fewer bits.
constexpr double least_of(DType type) { return type == DType::kBF16 ? 1e-30 : 0x1p-24; }

class NormTest : public GpuTest {};

double silu(double g) { return g / (1 + std::exp(-g)); }

// x + (bias + parts in order), in f32 as the kernel does.
std::vector<float> add_parts(std::vector<float> x, const std::vector<float>& parts,
                             const std::vector<float>& bias, int32_t splits) {
  const size_t count = x.size();
  for (size_t i = 0; i < count; ++i) {
    float sum = bias.empty() ? 0 : bias[i % bias.size()];
    for (int32_t s = 0; s < splits; ++s) sum += parts[static_cast<size_t>(s) * count + i];
    x[i] += sum;
  }
  return x;
}

TEST_F(NormTest, AddNormMatchesReference) {
  constexpr float kEpsilon = 1e-5f;
  for (const int64_t width : {8, 256, 704, 2048, 3584, 4096, 8192, 16384}) {
    for (const int64_t rows : {1, 3, 16}) {
      for (const int32_t splits : {0, 1, 2, 5, 7}) {
        for (const bool with_bias : {false, true}) {
          const DType type = kElementTypes[(rows + splits + (with_bias ? 1 : 0)) % 2];
          const std::vector<float> x = random_floats(rows * width, 1);
          const std::vector<float> parts = random_floats(splits * rows * width, 2);
          const std::vector<float> bias =
              with_bias && splits > 0 ? random_floats(width, 3) : std::vector<float>();
          const std::vector<float> weight = random_floats(width, 4);
          const DeviceArray<float> device_x(x), device_parts(parts), device_bias(bias),
              device_weight(weight);
          const DeviceArray<uint16_t> out(rows * width);
          add_norm({.x = device_x.data(),
                    .parts = splits > 0 ? device_parts.data() : nullptr,
                    .bias = bias.empty() ? nullptr : device_bias.data(),
                    .weight = device_weight.data(),
                    .out = out.data(),
                    .rows = rows,
                    .width = width,
                    .splits = splits,
                    .epsilon = kEpsilon,
                    .type = type},
                   nullptr);
          CLO_CUDA(cudaDeviceSynchronize());
          const std::vector<float> sum = add_parts(x, parts, bias, splits);
          EXPECT_EQ(device_x.download(), sum) << width << " splits " << splits;
          const std::vector<float> actual = from_bits(type, out.download());
          for (int64_t r = 0; r < rows; ++r) {
            double squares = 0;
            for (int64_t i = 0; i < width; ++i) {
              const double value = static_cast<double>(sum[static_cast<size_t>(r * width + i)]);
              squares += value * value;
            }
            const double scale =
                1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(kEpsilon));
            for (int64_t i = 0; i < width; ++i) {
              const auto at = static_cast<size_t>(r * width + i);
              const double expected = static_cast<double>(sum[at]) * scale *
                                      static_cast<double>(weight[static_cast<size_t>(i)]);
              ASSERT_NEAR(static_cast<double>(actual[at]), expected,
                          step_of(type) * std::abs(expected) + least_of(type))
                  << width << " row " << r << " at " << i;
            }
          }
        }
      }
    }
  }
}

TEST_F(NormTest, AddNormRowDoesNotDependOnBatch) {
  constexpr int64_t kWidth = 4096, kRows = 16;
  const std::vector<float> weight = random_floats(kWidth, 1);
  const std::vector<float> x = random_floats(kRows * kWidth, 2);
  const DeviceArray<float> device_weight(weight), together(x),
      alone(std::span<const float>(x).subspan(5 * kWidth, kWidth));
  const DeviceArray<uint16_t> out_together(kRows * kWidth), out_alone(kWidth);
  AddNorm params = {.x = together.data(),
                    .weight = device_weight.data(),
                    .out = out_together.data(),
                    .rows = kRows,
                    .width = kWidth,
                    .epsilon = 1e-6f};
  add_norm(params, nullptr);
  params.x = alone.data();
  params.out = out_alone.data();
  params.rows = 1;
  add_norm(params, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  const std::vector<uint16_t> all = out_together.download(), one = out_alone.download();
  EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + 5 * kWidth));
}

TEST_F(NormTest, GatedSiluMatchesReference) {
  for (const int64_t width : {8, 704, 3000, 14336}) {
    for (const int64_t rows : {1, 3, 17}) {
      for (const int32_t splits : {1, 2, 5}) {
        for (const bool with_bias : {false, true}) {
          const DType type = kElementTypes[(rows + splits + (with_bias ? 1 : 0)) % 2];
          const std::vector<float> parts = random_floats(splits * rows * 2 * width, 1, 3);
          const std::vector<float> bias =
              with_bias ? random_floats(2 * width, 2) : std::vector<float>();
          const DeviceArray<float> device_parts(parts), device_bias(bias);
          const DeviceArray<uint16_t> out(rows * width);
          gated_silu({.parts = device_parts.data(),
                      .bias = with_bias ? device_bias.data() : nullptr,
                      .out = out.data(),
                      .rows = rows,
                      .width = width,
                      .splits = splits,
                      .type = type},
                     nullptr);
          CLO_CUDA(cudaDeviceSynchronize());
          const std::vector<float> sum = add_parts(
              std::vector<float>(static_cast<size_t>(rows * 2 * width)), parts, bias, splits);
          const std::vector<float> actual = from_bits(type, out.download());
          for (int64_t i = 0; i < rows * width; ++i) {
            const auto gate = static_cast<size_t>(i / width * 2 * width + i % width);
            const double expected = silu(static_cast<double>(sum[gate])) *
                                    static_cast<double>(sum[gate + static_cast<size_t>(width)]);
            ASSERT_NEAR(static_cast<double>(actual[static_cast<size_t>(i)]), expected,
                        step_of(type) * std::abs(expected) + least_of(type));
          }
        }
      }
    }
  }
}

TEST_F(NormTest, GatedSiluOfExtremesIsFinite) {
  constexpr DType type = DType::kBF16;
  std::vector<float> parts(32);
  for (int i = 0; i < 16; ++i) {
    parts[static_cast<size_t>(i)] =
        (i % 2 == 0 ? 1.0f : -1.0f) * std::pow(10.0f, static_cast<float>(i));
    parts[static_cast<size_t>(16 + i)] = 1;
  }
  const DeviceArray<float> device_parts(parts);
  const DeviceArray<uint16_t> out(16);
  gated_silu({.parts = device_parts.data(), .out = out.data(), .rows = 1, .width = 16}, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  for (const float value : from_bits(type, out.download())) EXPECT_TRUE(std::isfinite(value));
}

TEST_F(NormTest, GatedSiluRowsMatchesReference) {
  for (const int64_t width : {8, 704, 14336}) {
    for (const int64_t rows : {1, 5, 300, 2}) {
      const DType type = kElementTypes[rows % 2];
      const std::vector<uint16_t> bits = to_bits(type, random_floats(rows * 2 * width, 1, 3));
      const std::vector<float> x = from_bits(type, bits);
      const DeviceArray<uint16_t> device_x(bits), out(rows * width);
      gated_silu_rows(
          {.x = device_x.data(), .out = out.data(), .rows = rows, .width = width, .type = type},
          nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
      const std::vector<float> actual = from_bits(type, out.download());
      for (int64_t i = 0; i < rows * width; ++i) {
        const auto gate = static_cast<size_t>(i / width * 2 * width + i % width);
        const double expected = silu(static_cast<double>(x[gate])) *
                                static_cast<double>(x[gate + static_cast<size_t>(width)]);
        ASSERT_NEAR(static_cast<double>(actual[static_cast<size_t>(i)]), expected,
                    step_of(type) * std::abs(expected) + least_of(type));
      }
    }
  }
}

// As CpuOps::rotary_table.
void expect_rotary(std::span<const float> cosine, std::span<const float> sine,
                   std::span<const float> inverse_frequencies, int64_t position, float factor) {
  for (size_t i = 0; i < inverse_frequencies.size(); ++i) {
    const float angle = static_cast<float>(position) * inverse_frequencies[i];
    EXPECT_FLOAT_EQ(cosine[i], static_cast<float>(std::cos(static_cast<double>(angle))) * factor);
    EXPECT_FLOAT_EQ(sine[i], static_cast<float>(std::sin(static_cast<double>(angle))) * factor);
  }
}

std::vector<float> inverse_frequencies(int32_t half_dim) {
  std::vector<float> values;
  for (int32_t i = 0; i < half_dim; ++i) {
    values.push_back(std::pow(10000.0f, -static_cast<float>(i) / static_cast<float>(half_dim)));
  }
  return values;
}

TEST_F(NormTest, BeginStepLooksUpAndRotates) {
  for (const DType type : kElementTypes) {
    constexpr int64_t kWidth = 264, kVocab = 50;
    constexpr int32_t kHalfDim = 64, kRows = 5;
    const std::vector<uint16_t> table = to_bits(type, random_floats(kVocab * kWidth, 1));
    const std::vector<float> embedding = from_bits(type, table);
    const std::vector<float> frequencies = inverse_frequencies(kHalfDim);
    std::vector<BatchSlot> slots(4);
    const auto fill = [&](size_t slot, int64_t num_tokens, int32_t token, int32_t active) {
      slots[slot].num_tokens = num_tokens;
      slots[slot].token = token;
      slots[slot].active = active;
    };
    fill(0, 0, 0, 1);
    fill(1, 1'000'003, 49, 1);
    fill(2, 7, 3, 0);
    fill(3, 131'071, 17, 1);
    const std::vector<int32_t> row_slot = {3, -1, 1, 2, 0};
    std::vector<RefreshQueue> queue(1);
    queue[0].step = 41;

    const DeviceArray<uint16_t> device_table(table);
    const DeviceArray<float> device_frequencies(frequencies), x(kRows * kWidth),
        cosine(kRows * kHalfDim), sine(kRows * kHalfDim);
    const DeviceArray<BatchSlot> device_slots(slots);
    const DeviceArray<int32_t> device_row_slot(row_slot);
    const DeviceArray<RefreshQueue> device_queue(queue);
    BeginStep params;
    params.tables.slots = device_slots.data();
    params.tables.row_slot = device_row_slot.data();
    params.tables.queue = device_queue.data();
    params.table = device_table.data();
    params.inverse_frequencies = device_frequencies.data();
    params.x = x.data();
    params.cosine = cosine.data();
    params.sine = sine.data();
    params.attention_factor = 1.25f;
    params.width = kWidth;
    params.rows = kRows;
    params.half_dim = kHalfDim;
    params.type = type;
    begin_step(params, nullptr);
    CLO_CUDA(cudaDeviceSynchronize());

    EXPECT_EQ(device_queue.download()[0].step, 42u);
    const std::vector<float> all_x = x.download(), all_cosine = cosine.download(),
                             all_sine = sine.download();
    for (int32_t r = 0; r < kRows; ++r) {
      const auto row = std::span(all_x).subspan(static_cast<size_t>(r * kWidth), kWidth);
      const auto c = std::span(all_cosine).subspan(static_cast<size_t>(r * kHalfDim), kHalfDim);
      const auto s = std::span(all_sine).subspan(static_cast<size_t>(r * kHalfDim), kHalfDim);
      const int32_t slot = row_slot[static_cast<size_t>(r)];
      if (slot < 0 || slots[static_cast<size_t>(slot)].active == 0) {
        for (const float value : row) EXPECT_EQ(value, 0);
        for (const float value : c) EXPECT_EQ(value, 0);
        for (const float value : s) EXPECT_EQ(value, 0);
        continue;
      }
      const BatchSlot& sequence = slots[static_cast<size_t>(slot)];
      for (int64_t i = 0; i < kWidth; ++i) {
        EXPECT_EQ(row[static_cast<size_t>(i)],
                  embedding[static_cast<size_t>(sequence.token * kWidth + i)]);
      }
      expect_rotary(c, s, frequencies, sequence.num_tokens, params.attention_factor);
    }
  }
}

TEST_F(NormTest, BeginChunkLooksUpAndRotates) {
  for (const DType type : kElementTypes) {
    constexpr int64_t kWidth = 2056, kVocab = 50, kRows = 37, kFirst = 999'990;
    constexpr int32_t kHalfDim = 32;
    const std::vector<uint16_t> table = to_bits(type, random_floats(kVocab * kWidth, 1));
    const std::vector<float> embedding = from_bits(type, table);
    const std::vector<float> frequencies = inverse_frequencies(kHalfDim);
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < kRows; ++r) ids.push_back(static_cast<int32_t>(r * 7 % kVocab));
    const DeviceArray<uint16_t> device_table(table);
    const DeviceArray<int32_t> device_ids(ids);
    const DeviceArray<float> device_frequencies(frequencies), x(kRows * kWidth),
        cosine(kRows * kHalfDim), sine(kRows * kHalfDim);
    begin_chunk({.ids = device_ids.data(),
                 .table = device_table.data(),
                 .inverse_frequencies = device_frequencies.data(),
                 .x = x.data(),
                 .cosine = cosine.data(),
                 .sine = sine.data(),
                 .first_position = kFirst,
                 .width = kWidth,
                 .rows = kRows,
                 .half_dim = kHalfDim,
                 .type = type},
                nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
    const std::vector<float> all_x = x.download(), all_cosine = cosine.download(),
                             all_sine = sine.download();
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < kWidth; ++i) {
        ASSERT_EQ(all_x[static_cast<size_t>(r * kWidth + i)],
                  embedding[static_cast<size_t>(ids[static_cast<size_t>(r)] * kWidth + i)]);
      }
      expect_rotary(std::span(all_cosine).subspan(static_cast<size_t>(r * kHalfDim), kHalfDim),
                    std::span(all_sine).subspan(static_cast<size_t>(r * kHalfDim), kHalfDim),
                    frequencies, kFirst + r, 1);
    }
  }
}

}  // namespace
}  // namespace clo::kernels
