#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tensor/arena.h"

namespace clo {
namespace {

TEST(DType, EveryHalfSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float from_f16 = f16_to_f32(half);
    if (!std::isnan(from_f16)) {
      ASSERT_EQ(f32_to_f16(from_f16), half);
    }
    const float from_bf16 = bf16_to_f32(half);
    if (!std::isnan(from_bf16)) {
      ASSERT_EQ(f32_to_bf16(from_bf16), half);
    }
  }
}

TEST(DType, RoundsToNearestEven) {
  EXPECT_EQ(f32_to_bf16(1.0f + 0x1p-8f), 0x3F80);             // tie, even below
  EXPECT_EQ(f32_to_bf16(1.0f + 3 * 0x1p-8f), 0x3F82);         // tie, even above
  EXPECT_EQ(f32_to_f16(1.0f + 0x1p-11f), 0x3C00);             // tie, even below
  EXPECT_EQ(f32_to_f16(1.0f + 0x1p-11f + 0x1p-20f), 0x3C01);  // above the tie
  EXPECT_EQ(f32_to_f16(65519.0f), 0x7BFF);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7C00);
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0x0000);
  EXPECT_EQ(f32_to_f16(1.5f * 0x1p-25f), 0x0001);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(std::numeric_limits<float>::quiet_NaN()))));
}

// What the format's definition says of a code.
double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? mantissa * std::ldexp(1.0, -9)
                                         : (8 + mantissa) * std::ldexp(1.0, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

TEST(E4m3, EveryCodeIsWhatTheFormatSays) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_f32(static_cast<uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    EXPECT_EQ(value, e4m3_value(code)) << code;
    EXPECT_EQ(std::signbit(value), (code & 0x80) != 0) << code;
    EXPECT_EQ(f32_to_e4m3(value), code);
  }
  EXPECT_EQ(e4m3_to_f32(0x7E), 448);
  EXPECT_EQ(e4m3_to_f32(0x08), 0x1p-6f);
  EXPECT_EQ(e4m3_to_f32(0x01), 0x1p-9f);
}

TEST(E4m3, RoundsToNearestEvenBetweenAnyTwoCodes) {
  for (int code = 0; code < 0x7E; ++code) {
    const auto low = static_cast<float>(e4m3_value(code));
    const auto high = static_cast<float>(e4m3_value(code + 1));
    const float middle = (low + high) / 2;  // exact: one bit more than either
    for (const float sign : {1.0f, -1.0f}) {
      const int bit = sign < 0 ? 0x80 : 0;
      EXPECT_EQ(f32_to_e4m3(sign * middle), bit | (code + code % 2)) << code;
      EXPECT_EQ(f32_to_e4m3(sign * std::nextafter(middle, 0.0f)), bit | code) << code;
      EXPECT_EQ(f32_to_e4m3(sign * std::nextafter(middle, 1e9f)), bit | (code + 1)) << code;
    }
  }
}

TEST(E4m3, SaturatesAndKeepsNaN) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float large : {448.0f, 449.0f, 464.0f, 480.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(f32_to_e4m3(large), 0x7E) << large;
    EXPECT_EQ(f32_to_e4m3(-large), 0xFE) << large;
  }
  for (const float nan : {std::numeric_limits<float>::quiet_NaN(),
                          std::bit_cast<float>(0xFFC00001u), std::bit_cast<float>(0x7F800001u)}) {
    EXPECT_EQ(f32_to_e4m3(nan), 0x7F);
  }
  EXPECT_EQ(f32_to_e4m3(0.0f), 0x00);
  EXPECT_EQ(f32_to_e4m3(-0.0f), 0x80);
  EXPECT_EQ(f32_to_e4m3(std::numeric_limits<float>::denorm_min()), 0x00);
}

TEST(Arena, MergesNeighboursAndKeepsItsBudget) {
  auto arena = Arena::create("device", 1024, ErrorCode::kDeviceMemory);
  ASSERT_TRUE(arena);
  std::byte* a = *arena->allocate(256);
  std::byte* b = *arena->allocate(250);
  std::byte* c = *arena->allocate(512);
  EXPECT_EQ(arena->used_bytes(), 1024);
  const auto refused = arena->allocate(1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kDeviceMemory);
  arena->deallocate(a);
  arena->deallocate(c);
  EXPECT_FALSE(arena->fits(768));
  arena->deallocate(b);
  EXPECT_TRUE(arena->fits(1024));
  EXPECT_EQ(arena->used_bytes(), 0);
  EXPECT_EQ(arena->peak_bytes(), 1024);
}

TEST(Arena, AShrunkBlockKeepsItsBeginningAndGivesTheRestBack) {
  auto arena = Arena::create("device", 1024, ErrorCode::kDeviceMemory);
  ASSERT_TRUE(arena);
  std::byte* a = *arena->allocate(512);
  std::byte* b = *arena->allocate(256);
  for (int i = 0; i < 512; ++i) a[i] = static_cast<std::byte>(i);
  arena->shrink(a, 512);
  EXPECT_EQ(arena->used_bytes(), 768);
  arena->shrink(a, 100);  // 128 in whole lines
  EXPECT_EQ(arena->used_bytes(), 384);
  std::byte* c = *arena->allocate(384);  // exactly what was given back
  EXPECT_EQ(c, a + 128);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a[i], static_cast<std::byte>(i));
  arena->deallocate(c);
  arena->shrink(b, 64);  // merges with what is free behind it
  arena->deallocate(a);
  EXPECT_FALSE(arena->fits(513));
  EXPECT_TRUE(arena->fits(512));
  arena->deallocate(b);
  EXPECT_TRUE(arena->fits(1024));
  EXPECT_DEATH(arena->shrink(a, 64), "device");
}

TEST(Arena, UnreadableArenaKillsTheReader) {
  auto arena = Arena::create("host", 4096, ErrorCode::kHostMemory);
  volatile std::byte* block = *arena->allocate(64);
  block[0] = std::byte{1};
  arena->set_accessible(false);
  EXPECT_DEATH({ static_cast<void>(block[0]); }, "");
  arena->set_accessible(true);
  EXPECT_TRUE(block[0] == std::byte{1});
}

}  // namespace
}  // namespace clo
