// Rows and weights become f32 and come back exactly as tensor/dtype does it, on every set of vector
// loops.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "ops/stored_row.h"
#include "simd_tables.h"
#include "tensor/dtype.h"

namespace clo {
namespace {

TEST(Conversion, EverySixteenBitNumberWidensExactly) {
  std::vector<uint16_t> bits(65536 + 3);  // and a tail that is no whole vector
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  for (const SimdTable* table : tables()) {
    for (const DType type : {DType::kF16, DType::kBF16}) {
      SCOPED_TRACE(std::string(table->name) + " " + std::string(dtype_name(type)));
      std::vector<float> wide(bits.size()), expected(bits.size());
      table->to_f32(type, reinterpret_cast<const std::byte*>(bits.data()), wide.data(),
                    std::ssize(bits));
      convert_to_f32(type, bits.data(), expected.data(), std::ssize(bits));
      for (size_t i = 0; i < bits.size(); ++i) {
        if (std::isnan(expected[i])) {
          ASSERT_TRUE(std::isnan(wide[i])) << bits[i];
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(expected[i]))
              << bits[i];
        }
      }
    }
  }
}

// Every code in every place of a row, with scales that round.
TEST(Conversion, CompressedRowsWidenAsTheirValuesAreDefined) {
  for (const SimdTable* table : tables()) {
    for (const auto& [stored, kind] :
         {std::pair{RowFormat::kInt8, RowKind::kInt8}, std::pair{RowFormat::kFp8, RowKind::kFp8}}) {
      for (const int32_t dim : {16, 80, 128}) {
        const KvShape shape{1, 1, 1, dim, DType::kF32, 0, stored};
        for (int first = 0; first < 256; ++first) {
          std::vector<std::byte> row(static_cast<size_t>(shape.stored_row_bytes()));
          for (int i = 0; i < 2 * dim; ++i) row[i] = static_cast<std::byte>(first + i);
          const float scales[2] = {0.0123f, 3.21f};
          if (stored == RowFormat::kInt8) {
            std::memcpy(row.data() + shape.scale_offset(), scales, sizeof scales);
          }
          const auto size = static_cast<size_t>(dim);
          std::vector<float> key(size), value(size), expected_key(size), expected_value(size);
          table->widen_row(kind, row.data(), dim, key.data(), value.data());
          expand_row(shape, row.data(), expected_key.data(), expected_value.data());
          for (size_t d = 0; d < size; ++d) {
            for (const auto& [found, expected] :
                 {std::pair{key[d], expected_key[d]}, std::pair{value[d], expected_value[d]}}) {
              if (std::isnan(expected)) {
                ASSERT_TRUE(std::isnan(found)) << table->name << " " << first + int(d);
              } else {
                ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(expected))
                    << table->name << " " << first + int(d);
              }
            }
          }
        }
      }
    }
  }
}

TEST(Conversion, RoundingIsThatOfTheTensors) {
  std::mt19937_64 generator(3);
  std::vector<float> values;
  for (int i = 0; i < 200'003; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(generator())));
  }
  // Where f16 rounds: ties, the ends of its range, subnormals.
  for (const float around : {1.0f, 0x1p-14f, 0x1p-24f, 0x1p-25f, 65504.0f, 65520.0f}) {
    for (int32_t step = -5000; step < 5000; ++step) {
      const uint32_t bits = std::bit_cast<uint32_t>(around) + static_cast<uint32_t>(step);
      values.push_back(std::bit_cast<float>(bits));
      values.push_back(-values.back());
    }
  }
  for (const SimdTable* table : tables()) {
    for (const DType type : {DType::kF16, DType::kBF16}) {
      SCOPED_TRACE(std::string(table->name) + " " + std::string(dtype_name(type)));
      std::vector<uint16_t> rounded(values.size()), expected(values.size());
      table->from_f32(type, values.data(), reinterpret_cast<std::byte*>(rounded.data()),
                      std::ssize(values));
      convert_from_f32(type, values.data(), expected.data(), std::ssize(values));
      for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(rounded[i], expected[i]) << values[i];
      }
    }
  }
}

}  // namespace
}  // namespace clo
