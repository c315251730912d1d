// Compressed rows, byte by byte: where the parts lie, how values are rounded, what is never healed.
#include "ops/stored_row.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace clo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

KvShape shape_of(int32_t head_dim, RowFormat stored, DType type = DType::kF32) {
  KvShape shape{1, 1, 1, head_dim, type, 0, stored};
  return shape;
}

// A stored row and what it means, with a guard after its last byte.
struct Row {
  Row(const KvShape& shape, const std::vector<float>& key, const std::vector<float>& value)
      : bytes(static_cast<size_t>(shape.stored_row_bytes()) + 16, std::byte{0xA5}),
        key_values(key.size()),
        value_values(value.size()) {
    compress_row(shape, key.data(), value.data(), bytes.data());
    expand_row(shape, bytes.data(), key_values.data(), value_values.data());
    for (size_t i = bytes.size() - 16; i < bytes.size(); ++i) {
      EXPECT_EQ(bytes[i], std::byte{0xA5}) << "written past the row";
    }
  }
  int code(int64_t i) const { return static_cast<int8_t>(bytes[static_cast<size_t>(i)]); }
  float float_at(int64_t offset) const {
    float x = 0;
    std::memcpy(&x, bytes.data() + offset, sizeof x);
    return x;
  }
  std::vector<std::byte> bytes;
  std::vector<float> key_values, value_values;
};

TEST(StoredRow, LiesAsTheHeaderSays) {
  EXPECT_EQ(shape_of(64, RowFormat::kInt8).stored_row_bytes(), 144);   // 128 + 8, in 16s
  EXPECT_EQ(shape_of(128, RowFormat::kInt8).stored_row_bytes(), 272);  // 256 + 8
  EXPECT_EQ(shape_of(80, RowFormat::kInt8).stored_row_bytes(), 176);   // 160 + 8
  EXPECT_EQ(shape_of(64, RowFormat::kFp8).stored_row_bytes(), 128);
  EXPECT_EQ(shape_of(80, RowFormat::kFp8).stored_row_bytes(), 160);
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    const KvShape full = shape_of(80, RowFormat::kFull, type);
    EXPECT_EQ(full.stored_row_bytes(), full.row_bytes());
    EXPECT_EQ(full.stored_value_offset(), full.value_offset());
    EXPECT_EQ(full.token_bytes(), full.row_bytes());
    // The full row does not depend on how rows are stored.
    EXPECT_EQ(shape_of(80, RowFormat::kInt8, type).row_bytes(), full.row_bytes());
    EXPECT_EQ(shape_of(80, RowFormat::kInt8, type).value_offset(), full.value_offset());
  }
  KvShape many = shape_of(64, RowFormat::kInt8);
  many.num_layers = 3;
  many.num_kv_heads = many.num_q_heads = 2;
  EXPECT_EQ(many.token_bytes(), 6 * 144);

  std::vector<float> key(80), value(80);
  for (int i = 0; i < 80; ++i) {
    key[static_cast<size_t>(i)] = static_cast<float>(i - 40) * 127 / 40;
    value[static_cast<size_t>(i)] = static_cast<float>(40 - i) * 254 / 40;
  }
  const Row row(shape_of(80, RowFormat::kInt8), key, value);
  EXPECT_EQ(row.code(0), -127);
  EXPECT_EQ(row.code(40), 0);
  EXPECT_EQ(row.code(80), 127);
  EXPECT_EQ(row.code(120), 0);
  EXPECT_EQ(row.float_at(160), 1.0f);
  EXPECT_EQ(row.float_at(164), 2.0f);
  for (size_t i = 168; i < 176; ++i) EXPECT_EQ(row.bytes[i], std::byte{0}) << "padding";
}

TEST(Int8Row, RoundsTiesToEven) {
  // The largest is 127, so scale and inverse are 1 and a value is its own product.
  std::vector<float> key(16, 0.0f);
  const std::vector<std::pair<float, int>> expected = {
      {127.0f, 127},    {0.5f, 0},       {1.5f, 2},     {2.5f, 2},     {-0.5f, 0},
      {-1.5f, -2},      {-2.5f, -2},     {126.5f, 126}, {125.5f, 126}, {0.49999997f, 0},
      {0.50000006f, 1}, {-126.5f, -126}, {3.0f, 3}};
  for (size_t i = 0; i < expected.size(); ++i) key[i] = expected[i].first;
  const Row row(shape_of(16, RowFormat::kInt8), key, key);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(row.code(static_cast<int64_t>(i)), expected[i].second) << expected[i].first;
    EXPECT_EQ(row.code(static_cast<int64_t>(16 + i)), expected[i].second) << expected[i].first;
    EXPECT_EQ(row.key_values[i], static_cast<float>(expected[i].second));
  }
}

TEST(Int8Row, HalvesHaveTheirOwnScales) {
  std::vector<float> key(32, 0.001f), value(32, 0.0f);
  value[7] = 300;
  value[8] = -1;
  const Row row(shape_of(32, RowFormat::kInt8), key, value);
  EXPECT_EQ(row.float_at(64), 0.001f / 127.0f);
  EXPECT_EQ(row.float_at(68), 300.0f / 127.0f);
  EXPECT_EQ(row.code(0), 127);
  EXPECT_EQ(row.code(32 + 8), 0);  // -1 / 2.36 rounds away
  EXPECT_EQ(row.value_values[7], 127.0f * (300.0f / 127.0f));
}

TEST(Int8Row, ZerosAndWhatIsNearlyNothingAreZero) {
  for (const float x : {0.0f, -0.0f, 1e-38f, std::numeric_limits<float>::denorm_min(),
                        std::nextafter(0x1p-100f, 0.0f)}) {
    const std::vector<float> half(16, x);
    const Row row(shape_of(16, RowFormat::kInt8), half, half);
    for (int i = 0; i < 32; ++i) EXPECT_EQ(row.code(i), 0) << x;
    EXPECT_EQ(row.float_at(32), 0.0f) << x;
    for (const float value : row.key_values) EXPECT_EQ(value, 0.0f) << x;
  }
  const std::vector<float> least(16, 0x1p-100f);
  const Row row(shape_of(16, RowFormat::kInt8), least, least);
  EXPECT_EQ(row.code(0), 127);
  EXPECT_EQ(row.float_at(32), 0x1p-100f / 127.0f);
}

TEST(Int8Row, ANotFiniteHalfPoisonsItselfAndNotTheOther) {
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    for (const bool in_key : {true, false}) {
      std::vector<float> key(32, 1.0f), value(32, 2.0f);
      (in_key ? key : value)[19] = bad;
      const Row row(shape_of(32, RowFormat::kInt8), key, value);
      const auto& poisoned = in_key ? row.key_values : row.value_values;
      const auto& sound = in_key ? row.value_values : row.key_values;
      for (const float x : poisoned) EXPECT_TRUE(std::isnan(x));
      for (const float x : sound) EXPECT_NEAR(x, in_key ? 2.0f : 1.0f, 1e-6);
      // The same bytes whatever it was: a row can be compared.
      EXPECT_EQ(std::bit_cast<uint32_t>(row.float_at(in_key ? 64 : 68)), 0x7FC00000u);
      for (int i = 0; i < 32; ++i) EXPECT_EQ(row.code((in_key ? 0 : 32) + i), 0);
    }
  }
}

TEST(Fp8Row, HoldsTheCodesOfItsValues) {
  std::vector<float> key(16), value(16);
  const float samples[] = {0.0f,  -0.0f,      1.0f, -1.0f, 448.0f, 500.0f, -kInfinity, kNan,
                           1.06f, 1.0f / 512, 0.3f, 17.0f, -0.01f, 3e-4f,  240.0f,     464.1f};
  for (size_t i = 0; i < 16; ++i) {
    key[i] = samples[i];
    value[i] = -samples[i];
  }
  const Row row(shape_of(16, RowFormat::kFp8), key, value);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(row.bytes[i], std::byte{f32_to_e4m3(key[i])});
    EXPECT_EQ(row.bytes[16 + i], std::byte{f32_to_e4m3(value[i])});
    if (i == 7) {
      EXPECT_TRUE(std::isnan(row.key_values[i]));
    } else {
      EXPECT_EQ(row.key_values[i], e4m3_to_f32(f32_to_e4m3(key[i])));
      EXPECT_EQ(row.value_values[i], -row.key_values[i]);
    }
  }
  EXPECT_EQ(row.key_values[6], -448.0f);
}

// Any values: each comes back within half a step, and a row of its own values is the same row.
RC_GTEST_PROP(StoredRow, IsWithinHalfAStepAndStable, ()) {
  const KvShape shape = shape_of(*rc::gen::element(16, 48, 80, 128),
                                 *rc::gen::element(RowFormat::kInt8, RowFormat::kFp8));
  const auto scale = std::ldexp(1.0, *rc::gen::inRange(-20, 9));
  const auto draw = [&] {
    std::vector<float> half;
    for (int32_t d = 0; d < shape.head_dim; ++d) {
      half.push_back(static_cast<float>(scale * *rc::gen::inRange(-1000000, 1000001) * 1e-6));
    }
    return half;
  };
  const std::vector<float> key = draw(), value = draw();
  const Row row(shape, key, value);
  for (const auto& [given, found] :
       {std::pair{&key, &row.key_values}, {&value, &row.value_values}}) {
    double largest = 0;
    for (const float x : *given) largest = std::max(largest, std::abs(double{x}));
    for (size_t d = 0; d < given->size(); ++d) {
      const double x = (*given)[d];
      // int8: half a step, and of at most 127 steps four f32 roundings (inverse and its product,
      // scale and its product) of 2^-24 each. e4m3: half a unit of three mantissa bits, at least
      // half the subnormal step; what is beyond 448 is saturated.
      const double bound =
          shape.stored == RowFormat::kInt8
              ? largest / 127 * (0.5 + 4 * 127 * std::ldexp(1.0, -24))
              : std::max({std::abs(x) / 16, std::ldexp(1.0, -10), std::abs(x) - 448});
      RC_ASSERT(std::abs((*found)[d] - x) <= bound);
    }
  }
  const Row again(shape, row.key_values, row.value_values);
  RC_ASSERT(again.key_values == row.key_values || shape.stored == RowFormat::kInt8);
  for (int64_t i = 0; i < 2 * shape.head_dim; ++i) RC_ASSERT(again.code(i) == row.code(i));
}

RC_GTEST_PROP(StoredRow, ExpandsToTheFullRowOfItsValues, ()) {
  const KvShape shape =
      shape_of(*rc::gen::element(16, 80, 128), *rc::gen::element(RowFormat::kInt8, RowFormat::kFp8),
               *rc::gen::element(DType::kF32, DType::kF16, DType::kBF16));
  std::vector<float> key, value;
  for (int32_t d = 0; d < shape.head_dim; ++d) {
    key.push_back(static_cast<float>(*rc::gen::inRange(-1000, 1001)) * 0.01f);
    value.push_back(static_cast<float>(*rc::gen::inRange(-1000, 1001)) * 0.003f);
  }
  const Row row(shape, key, value);
  std::vector<std::byte> full(static_cast<size_t>(shape.row_bytes())), expected(full.size());
  expand_to_full(shape, row.bytes.data(), full.data());
  convert_from_f32(shape.type, row.key_values.data(), expected.data(), shape.head_dim);
  convert_from_f32(shape.type, row.value_values.data(), expected.data() + shape.value_offset(),
                   shape.head_dim);
  RC_ASSERT(full == expected);
}

}  // namespace
}  // namespace clo
