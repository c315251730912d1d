#include "select/set_rule.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

namespace clo {
namespace {

PolicyOptions policy_of(int32_t sink, int32_t recent, double kv_ratio = 0.1,
                        int64_t set_tokens = 0) {
  PolicyOptions policy;
  policy.sink = sink;
  policy.recent = recent;
  policy.kv_ratio = kv_ratio;
  policy.set_tokens = set_tokens;
  return policy;
}

TEST(Candidates, StartAfterTheSinksAndEndBeforeTheRecent) {
  const PolicyOptions policy = policy_of(4, 64);
  const struct {
    int64_t context, end;
  } cases[] = {
      {0, 4},  {1, 4},  {4, 4},     {5, 4},     {64, 4},    {67, 4},     {68, 4},
      {69, 5}, {70, 6}, {256, 192}, {320, 256}, {321, 257}, {1000, 936}, {1 << 20, (1 << 20) - 64}};
  for (const auto& c : cases) {
    const CandidateRange range = candidates(policy, c.context);
    EXPECT_EQ(range.first, 4) << c.context;
    EXPECT_EQ(range.end, c.end) << c.context;
    EXPECT_EQ(range.size(), c.end - 4) << c.context;
  }
  // Without sinks and with one recent token all but the newest are candidates.
  EXPECT_EQ(candidates(policy_of(0, 1), 1).size(), 0);
  EXPECT_EQ(candidates(policy_of(0, 1), 2).size(), 1);
}

TEST(SetSize, IsAtLeast256AndGrowsBySteps) {
  const PolicyOptions policy = policy_of(4, 64, 0.1);
  const struct {
    int64_t context, size;
  } cases[] = {{0, 256},    {1, 256},        {256, 256},
               {2560, 256}, {2561, 320},     {3200, 320},
               {3201, 384}, {131072, 13120}, {int64_t{1} << 20, 104896}};
  for (const auto& c : cases) EXPECT_EQ(set_size(policy, c.context), c.size) << c.context;
  // 0.1 is a little above a tenth in binary; whole tenths must not be rounded up by that.
  for (int64_t tens = 5; tens < 2000; ++tens) {
    EXPECT_EQ(set_size(policy, tens * 640), std::max<int64_t>(256, tens * 64)) << tens;
  }
}

TEST(SetSize, RatiosAtTheirEnds) {
  EXPECT_EQ(set_size(policy_of(4, 64, 1.0), 1000), 1024);
  EXPECT_EQ(set_size(policy_of(4, 64, 1.0), 1024), 1024);
  EXPECT_EQ(set_size(policy_of(4, 64, 1e-9), int64_t{1} << 30), 256);
  EXPECT_EQ(set_size(policy_of(4, 64, 0.5), 513), 320);
}

TEST(SetSize, AGivenSizeWinsAtEveryContext) {
  for (const int64_t context : {0, 1, 256, 100000}) {
    EXPECT_EQ(set_size(policy_of(4, 64, 1.0, 7), context), 7);
    EXPECT_EQ(set_size(policy_of(4, 64, 0.1, 5000), context), 5000);
  }
}

TEST(SlotCapacity, IsTheLargestSetThatTheContextCanAskFor) {
  EXPECT_EQ(slot_capacity(policy_of(4, 64), 0), 1);  // a head always has a slot
  EXPECT_EQ(slot_capacity(policy_of(4, 64), 68), 1);
  EXPECT_EQ(slot_capacity(policy_of(4, 64), 70), 2);
  EXPECT_EQ(slot_capacity(policy_of(4, 64), 324), 256);
  EXPECT_EQ(slot_capacity(policy_of(4, 64), 2561), 320);
  EXPECT_EQ(slot_capacity(policy_of(4, 64, 0.1, 10), 100000), 10);
  EXPECT_EQ(slot_capacity(policy_of(4, 64, 0.1, 1 << 30), 100000), 100000 - 68);
}

TEST(RingTokens, AreRecentPlusLabelAge) {
  PolicyOptions policy = policy_of(4, 64);
  policy.max_label_age = 64;
  EXPECT_EQ(ring_tokens(policy), 128);
  policy.max_label_age = 0;
  EXPECT_EQ(ring_tokens(policy), 64);
}

RC_GTEST_PROP(SetRule, SizesGrowWithTheContextAndFitTheSlots, ()) {
  const PolicyOptions policy =
      policy_of(*rc::gen::inRange(0, 10), *rc::gen::inRange(1, 200),
                *rc::gen::inRange(1, 1001) / 1000.0, *rc::gen::element<int64_t>(0, 0, 1, 100, 300));
  const auto longest = *rc::gen::inRange<int64_t>(0, 20000);
  const int32_t slots = slot_capacity(policy, longest);
  RC_ASSERT(slots >= 1);
  int64_t last = 0;
  for (int64_t context = 0; context <= longest; context += 1 + longest / 50) {
    const int64_t size = set_size(policy, context);
    const CandidateRange range = candidates(policy, context);
    RC_ASSERT(size >= last);
    last = size;
    if (policy.set_tokens == 0) {
      RC_ASSERT(size >= 256);
      RC_ASSERT(size % 64 == 0);
      RC_ASSERT(static_cast<double>(size) >= policy.kv_ratio * static_cast<double>(context) - 1e-6);
    }
    RC_ASSERT(std::min(size, range.size()) <= slots);
    RC_ASSERT(range.first >= 0);
    RC_ASSERT(range.end <= std::max<int64_t>(range.first, context));
    RC_ASSERT(covers(policy, context) == (size >= range.size()));
  }
}

}  // namespace
}  // namespace clo
