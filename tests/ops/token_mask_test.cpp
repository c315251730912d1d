// Masked and visible tokens, against a list of booleans.
#include "ops/token_mask.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace clo {
namespace {

TEST(TokenMask, CountsByHand) {
  const std::vector<TokenRange> ranges = {{0, 2}, {5, 6}, {6, 9}};
  const TokenMask mask(ranges);  // 0 1 . . . 5 6 7 8 . .
  EXPECT_TRUE(mask.hides(0));
  EXPECT_TRUE(mask.hides(1));
  EXPECT_FALSE(mask.hides(2));
  EXPECT_FALSE(mask.hides(4));
  EXPECT_TRUE(mask.hides(5));
  EXPECT_TRUE(mask.hides(8));
  EXPECT_FALSE(mask.hides(9));
  EXPECT_EQ(mask.num_visible(0, 11), 5);
  EXPECT_EQ(mask.num_visible(1, 6), 3);
  EXPECT_EQ(mask.num_visible(6, 9), 0);
  EXPECT_EQ(mask.num_visible(7, 3), 0);
  EXPECT_EQ(mask.visible_token(0), 2);
  EXPECT_EQ(mask.visible_token(2), 4);
  EXPECT_EQ(mask.visible_token(3), 9);
}

RC_GTEST_PROP(TokenMask, EqualsAListOfBooleans, ()) {
  const auto flags =
      *rc::gen::container<std::vector<bool>>(*rc::gen::inRange(0, 40), rc::gen::arbitrary<bool>());
  const auto size = static_cast<int64_t>(flags.size());
  std::vector<TokenRange> ranges;
  for (int64_t t = 0; t < size; ++t) {
    if (!flags[static_cast<size_t>(t)]) continue;
    // Neighbours are one range or two: both are legal.
    const bool joins = !ranges.empty() && ranges.back().end == t && *rc::gen::arbitrary<bool>();
    if (joins) {
      ++ranges.back().end;
    } else {
      ranges.push_back({t, t + 1});
    }
  }
  const TokenMask mask(ranges);
  const auto masked = [&](int64_t t) { return t < size && flags[static_cast<size_t>(t)]; };
  std::vector<int64_t> visible;
  for (int64_t t = 0; t < size + 5; ++t) {
    RC_ASSERT(mask.hides(t) == masked(t));
    if (masked(t)) continue;
    RC_ASSERT(mask.visible_token(std::ssize(visible)) == t);
    visible.push_back(t);
  }
  const int64_t first = *rc::gen::inRange<int64_t>(0, size + 5);
  const int64_t end = *rc::gen::inRange<int64_t>(first, size + 6);
  std::vector<int64_t> seen, unseen, expected, expected_masked;
  for (int64_t t = first; t < end; ++t) (masked(t) ? expected_masked : expected).push_back(t);
  mask.for_each_visible(first, end, [&](int64_t a, int64_t b) {
    RC_ASSERT(a < b);
    for (; a < b; ++a) seen.push_back(a);
  });
  mask.for_each_masked(first, end, [&](int64_t a, int64_t b) {
    RC_ASSERT(a < b);
    for (; a < b; ++a) unseen.push_back(a);
  });
  RC_ASSERT(seen == expected);
  RC_ASSERT(unseen == expected_masked);
  RC_ASSERT(mask.num_visible(first, end) == std::ssize(expected));
}

}  // namespace
}  // namespace clo
