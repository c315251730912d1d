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
