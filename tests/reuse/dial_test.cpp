// The dial against made-up plants: what the mass loss follows is known, so what it must settle at
// is too.
#include "reuse/dial.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace clo {
namespace {

// A head whose fresh sets lose `fresh` of the mass at the policy's size, falling with the size, and
// whose kept sets lose `stale` more at the policy's angle, growing with it. Every fourth is fresh.
struct Plant {
  double fresh = 0.05, stale = 0.05, noise = 0;
  std::mt19937_64 generator{7};

  double loss(const DialSetting& s, bool is_fresh) {
    const double mean =
        fresh / std::pow(s.set_scale, 1.5) + (is_fresh ? 0 : stale * std::pow(s.angle, 1.5));
    const double drawn = noise == 0 ? 0 : std::normal_distribution<double>(0, noise)(generator);
    return std::clamp(mean + drawn, 0.0, 1.0);
  }
  // Mean loss of the last `counted` of `steps` samples.
  double run(Dial& dial, int steps, int counted) {
    double sum = 0;
    for (int i = 0; i < steps; ++i) {
      const bool is_fresh = i % 4 == 0;
      const double lost = loss(dial.setting(), is_fresh);
      if (i >= steps - counted) sum += lost;
      dial.add(1 - lost, is_fresh);
    }
    return sum / counted;
  }
};

TEST(DialTest, HoldsTheQualityFromAboveAndBelow) {
  for (const double quality : {0.9, 0.95, 0.98}) {
    for (const double size : {0.2, 0.5, 1.0, 1.5}) {
      SCOPED_TRACE(testing::Message() << "quality " << quality << " size " << size);
      Plant plant{.fresh = 0.05 * size, .stale = 0.05 * size, .noise = 0.02};
      Dial dial(quality, 8);
      const double lost = plant.run(dial, 4000, 2000);
      EXPECT_NEAR(lost, 1 - quality, 0.15 * (1 - quality) + 0.002);
    }
  }
}

TEST(DialTest, DividesTheLossBetweenItsCauses) {
  Plant plant;
  Dial dial(0.95, 8);
  plant.run(dial, 4000, 1);
  EXPECT_NEAR(plant.loss(dial.setting(), true), Dial::kFreshShare * 0.05, 0.006);
}

TEST(DialTest, LargestSetsLeaveTheRestToTheAngle) {
  // Even the largest sets lose 4 of the 5 points: kept ones may lose one.
  Plant plant{.fresh = 0.04 * std::pow(2, 1.5)};
  Dial dial(0.95, 2);
  const double lost = plant.run(dial, 4000, 2000);
  EXPECT_DOUBLE_EQ(dial.setting().set_scale, 2);
  EXPECT_NEAR(lost, 0.05, 0.008);
  // And what cannot be held makes the angle strict, not wide.
  Plant hopeless{.fresh = 0.2 * std::pow(2, 1.5)};
  Dial strict(0.95, 2);
  hopeless.run(strict, 4000, 1);
  EXPECT_DOUBLE_EQ(strict.setting().set_scale, 2);
  EXPECT_LT(strict.setting().angle, 0.25);
}

TEST(DialTest, WhatIsFreeIsTaken) {
  Plant plant{.fresh = 0, .stale = 0};
  Dial dial(0.99, 2);
  plant.run(dial, 4000, 1);
  EXPECT_DOUBLE_EQ(dial.setting().set_scale, Dial::kLeastSetScale);
  EXPECT_DOUBLE_EQ(dial.setting().angle, Dial::kMostAngle);
}

TEST(DialTest, WithoutKeptSetsTheSizeHasItAll) {
  Dial dial(0.95, 8);
  Plant plant;
  for (int i = 0; i < 4000; ++i) dial.add(1 - plant.loss(dial.setting(), true), true);
  EXPECT_NEAR(plant.loss(dial.setting(), true), 0.05, 0.003);
  EXPECT_DOUBLE_EQ(dial.setting().angle, 1);
}

TEST(DialTest, FirstSetsTurnItAndAreNoStep) {
  // However few heads there are, and once, when all have been seen.
  for (const int64_t heads : {int64_t{3}, 3 * Dial::kWindow}) {
    Dial dial(0.95, 8);
    dial.start();
    EXPECT_EQ(dial.setting().set_scale, 1);
    for (int64_t i = 0; i < heads; ++i) dial.add_first(0.8);
    EXPECT_EQ(dial.setting().set_scale, 1);
    dial.start();
    EXPECT_NEAR(dial.setting().set_scale, 2, 1e-9);  // the root of 0.2 / 0.05
    EXPECT_EQ(dial.setting().angle, 1);
    EXPECT_EQ(dial.estimate().samples, 0);
  }
}

TEST(DialTest, EstimatesTheMeanWithItsInterval) {
  Dial dial(0.9, 2);
  for (const double kept : {0.8, 0.9, 1.0, 0.9}) dial.add(kept, true);
  dial.add(NAN, true);
  const MassEstimate e = dial.estimate();
  EXPECT_EQ(e.samples, 4);
  EXPECT_NEAR(e.mean, 0.9, 1e-12);
  // Standard deviation sqrt(0.02 / 3), over the root of four, times 1.96.
  EXPECT_NEAR(e.high - e.mean, 1.96 * std::sqrt(0.02 / 3) / 2, 1e-12);
  EXPECT_NEAR(e.mean - e.low, e.high - e.mean, 1e-12);
}

}  // namespace
}  // namespace clo
