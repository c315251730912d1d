#include "select/hash_signs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace clo {
namespace {

TEST(HashWidth, IsAPowerOfTwoOfAtLeast32) {
  const std::pair<int32_t, int32_t> cases[] = {{16, 32},   {32, 32},  {48, 64},   {64, 64},
                                               {80, 128},  {96, 128}, {128, 128}, {144, 256},
                                               {256, 256}, {512, 512}};
  for (const auto& [head_dim, width] : cases) EXPECT_EQ(hash_width(head_dim), width) << head_dim;
}

std::vector<uint32_t> words_of(const HashParams& params, int64_t count) {
  return {params.signs, params.signs + count};
}

TEST(HashSigns, AreTheSameInEveryRunAndDifferAmongHeads) {
  const KvShape shape{3, 8, 4, 64, DType::kBF16, 128};
  const int64_t words = 2 * 2 * 64 / 32;  // two bases of two rounds of 64 signs
  const HashSigns first(shape, kHashSeed), second(shape, kHashSeed), other(shape, kHashSeed + 1);
  std::set<std::vector<uint32_t>> seen;
  for (int32_t layer = 0; layer < 3; ++layer) {
    for (int32_t head = 0; head < 4; ++head) {
      const HashParams params = first.params(layer, head);
      EXPECT_EQ(params.head_dim, 64);
      EXPECT_EQ(params.width, 64);
      EXPECT_EQ(params.bits, 128);
      EXPECT_EQ(params.weights, nullptr);
      const auto signs = words_of(params, words);
      EXPECT_EQ(signs, words_of(second.params(layer, head), words));
      EXPECT_NE(signs, words_of(other.params(layer, head), words));
      seen.insert(signs);
    }
  }
  EXPECT_EQ(seen.size(), 12u);
}

TEST(HashSigns, HeadsDoNotOverlapInMemory) {
  const KvShape shape{2, 3, 3, 48, DType::kF32, 64};
  const HashSigns signs(shape, kHashSeed);
  const int64_t words = 1 * 2 * 64 / 32;
  const uint32_t* last = nullptr;
  for (int32_t layer = 0; layer < 2; ++layer) {
    for (int32_t head = 0; head < 3; ++head) {
      const uint32_t* at = signs.params(layer, head).signs;
      if (last != nullptr) {
        EXPECT_EQ(at - last, words);
      }
      last = at;
    }
  }
}

// The first words are part of what a stored code means: a change makes codes of two versions
// disagree, so it must be noticed. SplitMix64 of the seed, upper halves.
TEST(HashSigns, FirstWordsAreThePublishedGenerators) {
  const HashSigns signs({1, 1, 1, 64, DType::kF32, 64}, 0);
  // SplitMix64 with seed 0 begins 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F.
  EXPECT_EQ(signs.params(0, 0).signs[0], 0xE220A839u);
  EXPECT_EQ(signs.params(0, 0).signs[1], 0x6E789E6Au);
  EXPECT_EQ(signs.params(0, 0).signs[2], 0x06C45D18u);
}

TEST(HashSigns, AboutHalfOfTheSignsAreNegative) {
  const KvShape shape{32, 8, 8, 128, DType::kBF16, 128};
  const HashSigns signs(shape, kHashSeed);
  int64_t set = 0;
  const int64_t words = int64_t{32} * 8 * 2 * 128 / 32;
  for (int64_t i = 0; i < words; ++i) set += __builtin_popcount(signs.params(0, 0).signs[i]);
  // 65,536 fair bits: five standard deviations are 640.
  EXPECT_NEAR(static_cast<double>(set), 32768.0, 640.0);
}

}  // namespace
}  // namespace clo
