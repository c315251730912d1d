#include "reuse/reuse_rule.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numbers>

namespace clo {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

PolicyOptions adaptive(double eta, double exponent) {
  PolicyOptions policy;
  policy.eta = eta;
  policy.importance_exponent = exponent;
  return policy;
}

PolicyOptions plain(double threshold, Aggregate aggregate) {
  PolicyOptions policy;
  policy.threshold = threshold;
  policy.aggregate = aggregate;
  return policy;
}

constexpr std::array kAggregates = {Aggregate::kMean, Aggregate::kWeighted, Aggregate::kAll};

// The published table: tau by importance (columns) and eta (rows), p = 1, to three digits.
TEST(HeadThreshold, EqualsThePublishedTable) {
  constexpr float kImportance[] = {1, .98f, .95f, .9f, .8f, .7f, .5f, 0};
  constexpr struct {
    double eta;
    double tau[8];
  } kRows[] = {{.95, {.950, .931, .897, .825, .635, .395, -.158, -1}},
               {.90, {.900, .875, .833, .752, .549, .308, -.224, -1}},
               {.80, {.800, .769, .719, .627, .415, .177, -.316, -1}}};
  for (const auto& row : kRows) {
    for (size_t i = 0; i < 8; ++i) {
      EXPECT_NEAR(head_threshold(adaptive(row.eta, 1), kImportance[i]), row.tau[i], 5.1e-4)
          << "eta " << row.eta << ", s " << kImportance[i];
    }
  }
  // A smaller exponent pushes a head towards eta, a larger one relaxes it.
  EXPECT_NEAR(head_threshold(adaptive(.95, .5), .5f), .413, 5.1e-4);
  EXPECT_NEAR(head_threshold(adaptive(.95, 2), .5f), -.761, 5.1e-4);
}

TEST(HeadThreshold, AtTheEndsOfItsRange) {
  EXPECT_EQ(head_threshold(adaptive(.9, 1), 0), -1);
  EXPECT_EQ(head_threshold(adaptive(.9, 1), -3), -1);  // importance is clamped
  EXPECT_NEAR(head_threshold(adaptive(.9, 1), 7), .9, 1e-12);
  EXPECT_GT(head_threshold(adaptive(1.5, 1), 0), 1);  // above 1: never a hit, whatever the head
  EXPECT_EQ(head_threshold(adaptive(-1, 1), 1), -1);
  EXPECT_EQ(head_threshold(plain(.3, Aggregate::kMean), .1f), .3);
}

RC_GTEST_PROP(HeadThreshold, GrowsWithImportance, ()) {
  const PolicyOptions policy =
      adaptive(*rc::gen::inRange(-100, 101) / 100.0, *rc::gen::inRange(1, 400) / 100.0);
  const float low = static_cast<float>(*rc::gen::inRange(0, 1001)) / 1000;
  const float high = static_cast<float>(*rc::gen::inRange(0, 1001)) / 1000;
  RC_PRE(low <= high);
  RC_ASSERT(head_threshold(policy, low) <= head_threshold(policy, high) + 1e-12);
  RC_ASSERT(head_threshold(policy, low) >= -1);
  RC_ASSERT(head_threshold(policy, high) <= std::max(policy.eta, -1.0) + 1e-12);
}

TEST(SimilarEnough, MeanComparesTheMean) {
  const PolicyOptions policy = plain(.5, Aggregate::kMean);
  const std::array<float, 2> ones = {1, 1};
  EXPECT_TRUE(similar_enough(policy, std::array{.75f, .25f}, ones));
  EXPECT_FALSE(similar_enough(policy, std::array{.75f, .2f}, ones));
  // Importance does not weigh.
  EXPECT_TRUE(similar_enough(policy, std::array{.75f, .25f}, std::array{0.f, 1.f}));
}

TEST(SimilarEnough, MeanUsesTheThresholdOfTheMeanImportance) {
  PolicyOptions policy = adaptive(.9, 1);
  policy.aggregate = Aggregate::kMean;
  const std::array<float, 2> importance = {1.f, .6f};  // mean .8: tau .549
  EXPECT_TRUE(similar_enough(policy, std::array{.56f, .56f}, importance));
  EXPECT_FALSE(similar_enough(policy, std::array{.54f, .54f}, importance));
}

TEST(SimilarEnough, WeightedLetsImportantHeadsDecide) {
  PolicyOptions policy = adaptive(.9, 1);
  policy.aggregate = Aggregate::kWeighted;
  const std::array<float, 2> importance = {1.f, .1f};                       // tau .9 of the larger
  EXPECT_TRUE(similar_enough(policy, std::array{.97f, .3f}, importance));   // .909
  EXPECT_FALSE(similar_enough(policy, std::array{.95f, .3f}, importance));  // .891
  EXPECT_FALSE(similar_enough(policy, std::array{.3f, 1.f}, importance));
  // No head of the group matters: the set stays.
  EXPECT_TRUE(similar_enough(policy, std::array{-1.f, -1.f}, std::array{0.f, 0.f}));
}

TEST(SimilarEnough, AllAsksEachHead) {
  PolicyOptions policy = adaptive(.9, 1);
  policy.aggregate = Aggregate::kAll;
  const std::array<float, 2> importance = {1.f, .8f};  // tau .9 and .549
  EXPECT_TRUE(similar_enough(policy, std::array{.91f, .56f}, importance));
  EXPECT_FALSE(similar_enough(policy, std::array{.91f, .54f}, importance));
  EXPECT_FALSE(similar_enough(policy, std::array{.89f, .99f}, importance));
}

TEST(SimilarEnough, NaNIsAMissWhereverItIs) {
  for (const Aggregate aggregate : kAggregates) {
    for (const double threshold : {-1.0, 0.5}) {
      const PolicyOptions policy = plain(threshold, aggregate);
      const std::array<float, 3> ones = {1, 1, 1};
      EXPECT_FALSE(similar_enough(policy, std::array{kNaN, 1.f, 1.f}, ones));
      EXPECT_FALSE(similar_enough(policy, std::array{1.f, 1.f, kNaN}, ones));
      // Even of a head that does not matter: its query is broken.
      EXPECT_FALSE(similar_enough(policy, std::array{1.f, kNaN, 1.f}, std::array{1.f, 0.f, 1.f}));
    }
  }
}

TEST(SimilarEnough, AThresholdAboveOneIsAlwaysAMiss) {
  for (const Aggregate aggregate : kAggregates) {
    PolicyOptions by_eta = adaptive(1.01, .5);
    by_eta.aggregate = aggregate;
    for (const PolicyOptions& policy : {plain(1.01, aggregate), plain(2, aggregate), by_eta}) {
      // Rounding can make the cosine of equal vectors a little larger than 1.
      for (const float cosine : {1.f, 1.0000002f, 5.f, 0.f}) {
        for (const float importance : {1.f, .5f, 0.f}) {
          EXPECT_FALSE(similar_enough(policy, std::array{cosine, cosine},
                                      std::array{importance, importance}))
              << static_cast<int>(aggregate) << " cosine " << cosine << " s " << importance;
        }
      }
    }
  }
}

TEST(SimilarEnough, AThresholdOfMinusOneIsAlwaysAHit) {
  for (const Aggregate aggregate : kAggregates) {
    const PolicyOptions policy = plain(-1, aggregate);
    for (const float cosine : {-1.f, -1.0000002f, 0.f, 1.f}) {
      for (const float importance : {1.f, .5f, 0.f}) {
        EXPECT_TRUE(
            similar_enough(policy, std::array{cosine, cosine}, std::array{importance, importance}));
      }
    }
  }
}

TEST(SimilarEnough, AnExactMatchIsAHitAtThresholdOne) {
  for (const Aggregate aggregate : kAggregates) {
    EXPECT_TRUE(similar_enough(plain(1, aggregate), std::array{1.f, 1.f}, std::array{1.f, 1.f}));
    EXPECT_FALSE(similar_enough(plain(1, aggregate), std::array{1.f, .999f}, std::array{1.f, 1.f}));
  }
}

RC_GTEST_PROP(SimilarEnough, AHigherCosineNeverTurnsAHitIntoAMiss, ()) {
  PolicyOptions policy = adaptive(*rc::gen::inRange(50, 100) / 100.0, .5);
  policy.aggregate = *rc::gen::elementOf(kAggregates);
  const auto group = static_cast<size_t>(*rc::gen::inRange(1, 9));
  std::vector<float> cosine, importance;
  for (size_t j = 0; j < group; ++j) {
    cosine.push_back(static_cast<float>(*rc::gen::inRange(-1000, 1001)) / 1000);
    importance.push_back(static_cast<float>(*rc::gen::inRange(0, 101)) / 100);
  }
  RC_PRE(similar_enough(policy, cosine, importance));
  cosine[static_cast<size_t>(*rc::gen::inRange<size_t>(0, group))] = 1;
  RC_ASSERT(similar_enough(policy, cosine, importance));
}

class Decide : public testing::Test {
 protected:
  Decision operator()(const SetHistory& history, int64_t context, bool covers, int64_t ring_begin,
                      float cosine) const {
    return decide(policy_, history, context, covers, ring_begin, std::array{cosine},
                  std::array{1.f});
  }
  PolicyOptions policy_ = plain(.9, Aggregate::kWeighted);
};

TEST_F(Decide, FollowsItsOrder) {
  policy_.max_label_age = 10;
  const SetHistory none{}, set{true, 100, 90};
  // Everything speaks for a new choice: the first reason is named.
  EXPECT_EQ((*this)(none, 200, true, 150, kNaN), Decision::kMiss);
  EXPECT_EQ((*this)(set, 200, true, 150, kNaN), Decision::kIncomplete);
  EXPECT_EQ((*this)(set, 200, false, 150, kNaN), Decision::kAged);
  EXPECT_EQ((*this)(set, 105, false, 89, kNaN), Decision::kMiss);
  EXPECT_EQ((*this)(set, 105, false, 89, .95f), Decision::kHit);
  EXPECT_EQ((*this)(set, 105, false, 89, .85f), Decision::kMiss);
  // Without a label no cosine helps.
  EXPECT_EQ((*this)(none, 105, false, 89, 1.f), Decision::kMiss);
}

TEST_F(Decide, AgeIsExceededOneStepAfterTheMaximum) {
  policy_.max_label_age = 10;
  const SetHistory set{true, 100, 90};
  EXPECT_EQ((*this)(set, 110, false, 90, 1.f), Decision::kHit);
  EXPECT_EQ((*this)(set, 111, false, 91, 1.f), Decision::kAged);
  policy_.max_label_age = 0;  // no limit
  EXPECT_EQ((*this)(set, 1000000, false, 999000, 1.f), Decision::kHit);
}

TEST_F(Decide, ASetThatCanHoldAllIsIncompleteOnceATokenLeavesTheRingUnseen) {
  policy_.max_label_age = 0;
  const SetHistory set{true, 100, 90};
  EXPECT_EQ((*this)(set, 101, true, 90, 1.f), Decision::kHit);  // token 90 is still in the ring
  EXPECT_EQ((*this)(set, 102, true, 91, 1.f), Decision::kIncomplete);
  EXPECT_EQ((*this)(set, 102, false, 91, 1.f), Decision::kHit);
}

TEST_F(Decide, ASetThatCanHoldAllIsIncompleteWhenItsChoiceLeftSomeOut) {
  policy_.max_label_age = 10;
  const SetHistory some{true, 100, 90, false};
  EXPECT_EQ((*this)(some, 101, true, 80, 1.f), Decision::kIncomplete);
  EXPECT_EQ((*this)(some, 101, false, 80, 1.f), Decision::kHit);
}

TEST(AheadThreshold, LiesBetweenTheThresholdAndOne) {
  EXPECT_DOUBLE_EQ(ahead_threshold(0.8, 0), 0.8);
  EXPECT_DOUBLE_EQ(ahead_threshold(0.8, 1), 1);
  EXPECT_DOUBLE_EQ(ahead_threshold(0, 0.5), std::cos(std::numbers::pi / 4));
  // Always and never stay what they are.
  EXPECT_EQ(ahead_threshold(-1, 0.5), -1);
  EXPECT_EQ(ahead_threshold(2, 0.5), 2);
  double last = -1;
  for (const double margin : {0.0, 0.1, 0.3, 0.5, 0.9}) {
    EXPECT_GT(ahead_threshold(0.3, margin), last);
    last = ahead_threshold(0.3, margin);
  }
}

TEST(PrefetchMargin, IsForPredictionsThatAreCorrected) {
  PolicyOptions policy;
  policy.predict = Predict::kPreviousStep;
  EXPECT_EQ(prefetch_margin(policy), 0);
  policy.correction = Correction::kTrueQuery;
  EXPECT_EQ(prefetch_margin(policy), policy.prefetch_margin);
}

TEST_F(Decide, APredictionMissesEarlierByItsMargin) {
  policy_.threshold = 0.8;
  const SetHistory set{true, 100, 90};
  const std::vector<float> cosine = {0.9f}, importance = {1.0f};
  // Half of acos(0.8) is acos(0.949).
  EXPECT_EQ(decide(policy_, set, 105, false, 89, cosine, importance), Decision::kHit);
  EXPECT_EQ(decide(policy_, set, 105, false, 89, cosine, importance, 0.5), Decision::kMiss);
  EXPECT_EQ(decide(policy_, set, 105, false, 89, std::vector<float>{0.95f}, importance, 0.5),
            Decision::kHit);
}

TEST(AheadThreshold, WidensUpToHalfATurn) {
  EXPECT_NEAR(ahead_threshold(0.5, -1), std::cos(2 * std::numbers::pi / 3), 1e-12);
  EXPECT_DOUBLE_EQ(ahead_threshold(0, -3), -1);
}

TEST_F(Decide, ASetFarTooSmallIsIncomplete) {
  const PolicyOptions policy;
  SetHistory set{true, 100, 36};
  const std::vector<float> one = {1.0f};
  EXPECT_EQ(decide(policy, set, 101, false, 0, one, one), Decision::kHit);
  set.too_small = true;
  EXPECT_EQ(decide(policy, set, 101, false, 0, one, one), Decision::kIncomplete);
}

TEST(GroupMean, WeighsAsThePolicySays) {
  PolicyOptions policy;
  const std::vector<float> values = {1, 3}, importance = {0.25f, 0.75f};
  EXPECT_DOUBLE_EQ(group_mean(policy, values, importance), 2.5);
  policy.aggregate = Aggregate::kMean;
  EXPECT_DOUBLE_EQ(group_mean(policy, values, importance), 2);
  policy.aggregate = Aggregate::kWeighted;
  EXPECT_DOUBLE_EQ(group_mean(policy, values, std::vector<float>{0, 0}), 0);
  EXPECT_TRUE(std::isnan(group_mean(policy, std::vector<float>{NAN, 1}, importance)));
}

TEST(ScoreDrift, SeesLengthsThatTheCosineDoesNot) {
  // |q - label| = 5, times the keys' spread 2 and the scale 0.1.
  EXPECT_FLOAT_EQ(score_drift(std::vector<float>{3, 4}, std::vector<float>{0, 0}, 2, 0.1f), 1.0f);
  EXPECT_FLOAT_EQ(score_drift(std::vector<float>{6, 8}, std::vector<float>{3, 4}, 2, 0.1f), 1.0f);
}

}  // namespace
}  // namespace clo
