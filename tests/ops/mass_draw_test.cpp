// Who is looked at and what is drawn.
#include "ops/mass_draw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace clo {
namespace {

TEST(MassDraw, EveryHeadHasItsTurn) {
  for (const int32_t heads : {1, 2, 3, 7, 90, 256, 640, 65535}) {
    std::vector<int> times(static_cast<size_t>(heads), 0);
    // Steps whose looks fill whole rounds.
    for (int64_t step = heads; step < 2 * int64_t{heads}; ++step) {
      const int64_t context = step * kMassPeriod;
      for (int32_t look = 0; look < kMassLooks; ++look) {
        const int32_t head = head_looked_at(context, look, heads);
        ASSERT_GE(head, 0);
        ASSERT_LT(head, heads);
        EXPECT_TRUE(is_looked_at(context, head, heads));
        ++times[static_cast<size_t>(head)];
      }
    }
    EXPECT_EQ(times, std::vector<int>(static_cast<size_t>(heads), kMassLooks)) << heads;
  }
}

TEST(MassDraw, RoundsHaveOtherOrders) {
  std::set<std::vector<int32_t>> orders;
  for (int64_t round = 0; round < 20; ++round) {
    std::vector<int32_t> order;
    for (int64_t step = 0; step < 32 / kMassLooks; ++step) {
      const int64_t context = (round * 32 / kMassLooks + step) * kMassPeriod;
      for (int32_t look = 0; look < kMassLooks; ++look) {
        order.push_back(head_looked_at(context, look, 32));
      }
    }
    orders.insert(order);
  }
  EXPECT_GE(orders.size(), 18u);
  EXPECT_FALSE(is_looked_at(5 * kMassPeriod, 40, 32));
  for (int32_t head = 0; head < 8; ++head) EXPECT_FALSE(is_looked_at(kMassPeriod + 1, head, 8));
}

TEST(MassDraw, TokensAreSpreadOverTheRange) {
  constexpr int64_t kFirst = 4, kCount = 100000;
  std::vector<int> tenths(10, 0);
  std::set<int64_t> seen;
  for (int32_t number = 0; number < kMassRows; ++number) {
    const int64_t token = drawn_token(131072, 17, number, 0, kFirst, kCount);
    ASSERT_GE(token, kFirst);
    ASSERT_LT(token, kFirst + kCount);
    ++tenths[static_cast<size_t>((token - kFirst) * 10 / kCount)];
    seen.insert(token);
    EXPECT_NE(token, drawn_token(131072, 17, number, 1, kFirst, kCount));
  }
  EXPECT_GT(seen.size(), kMassRows * 0.98);
  for (const int tenth : tenths) EXPECT_NEAR(tenth, kMassRows / 10, 40);
  // Another head, another context: other tokens.
  int same = 0;
  for (int32_t number = 0; number < kMassRows; ++number) {
    const int64_t token = drawn_token(131072, 17, number, 0, kFirst, kCount);
    same += token == drawn_token(131072, 18, number, 0, kFirst, kCount);
    same += token == drawn_token(131073, 17, number, 0, kFirst, kCount);
  }
  EXPECT_LT(same, 5);
  EXPECT_EQ(drawn_token(9, 0, 3, 0, 12, 1), 12);
}

}  // namespace
}  // namespace clo
