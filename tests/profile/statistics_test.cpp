#include <gtest/gtest.h>

#include <cmath>

#include "profile/head_statistics.h"
#include "profile/measure.h"

namespace clo {
namespace {

// Everything but the window's own numbers is this: no sinks, one recent token.
PolicyOptions bare_policy() {
  PolicyOptions policy;
  policy.sink = 0;
  policy.recent = 1;
  return policy;
}

// A window of one query head; queries and keys are rows of `dim` numbers.
struct World {
  std::vector<float> keys, queries;
  HeadShape shape;
  HeadWindow window;

  World(int32_t dim, std::vector<float> keys_in, std::vector<float> queries_in)
      : keys(std::move(keys_in)), queries(std::move(queries_in)), shape{1, dim} {
    window.keys = keys;
    window.queries = queries;
    window.num_tokens = std::ssize(keys) / dim;
    window.num_steps = std::ssize(queries) / dim;
    window.first_context = window.num_tokens - window.num_steps + 1;
  }
};

TEST(Spread, IsTheMeanAndOrderedQuantiles) {
  EXPECT_EQ(spread_of({}), (std::array<float, kNumSpread>{}));
  std::vector<float> values;
  for (int i = 100; i >= 0; --i) values.push_back(static_cast<float>(i));
  EXPECT_EQ(spread_of(values), (std::array<float, kNumSpread>{50, 5, 25, 50, 75, 95}));
  EXPECT_FLOAT_EQ(spread_of({0, 1})[3], 0.5f);
}

TEST(Cosine, ByHand) {
  const std::vector<float> x = {1, 0}, y = {0, 2}, z = {3, 4}, none = {0, 0};
  EXPECT_FLOAT_EQ(cosine_of(x, x), 1);
  EXPECT_FLOAT_EQ(cosine_of(x, y), 0);
  EXPECT_FLOAT_EQ(cosine_of(x, z), 0.6f);
  EXPECT_FLOAT_EQ(cosine_of(x, none), 0);
}

TEST(QueryCosines, LookBackByTheLagAndUndoTheRotation) {
  // One pair that turns by 0.1 a token: apart it is the angle, undone it is always the same.
  constexpr int kSteps = 20;
  const std::vector<float> frequencies = {0.1f};
  std::vector<float> queries, keys(2 * 40, 0.0f);
  for (int step = 0; step < kSteps; ++step) {
    const float angle = 0.1f * static_cast<float>(20 + step);  // the step's position
    queries.push_back(2 * std::cos(angle));
    queries.push_back(2 * std::sin(angle));
  }
  const World world(2, keys, queries);
  ASSERT_EQ(world.window.context_of(0) - 1, 20);
  const auto rotated = query_cosines(world.shape, {&world.window, 1}, 0, {});
  const auto undone = query_cosines(world.shape, {&world.window, 1}, 0, frequencies);
  for (int lag = 1; lag <= kMaxLag; ++lag) {
    for (const float figure : rotated[lag - 1]) EXPECT_NEAR(figure, std::cos(0.1 * lag), 1e-5);
    for (const float figure : undone[lag - 1]) EXPECT_NEAR(figure, 1, 1e-5);
  }
}

TEST(UndoRotation, IsTheInverseOfTheRotation) {
  const std::vector<float> frequencies = {1, 0.25f, 0.01f};
  const std::vector<float> x = {1, -2, 3, 0.5f, 4, -1};
  for (const int64_t position : {0, 1, 777, 131071}) {
    std::vector<float> turned(6);
    for (int i = 0; i < 3; ++i) {
      const double angle = static_cast<float>(position) * frequencies[i];
      turned[i] = static_cast<float>(x[i] * std::cos(angle) - x[i + 3] * std::sin(angle));
      turned[i + 3] = static_cast<float>(x[i + 3] * std::cos(angle) + x[i] * std::sin(angle));
    }
    undo_rotation(turned, frequencies, position);
    for (int i = 0; i < 6; ++i) EXPECT_NEAR(turned[i], x[i], 1e-5) << position;
  }
}

TEST(Attention, EntropyModesAndMassByHand) {
  // 256 tokens; the query meets only tokens 10, 11 and 200, all alike.
  std::vector<float> keys(256, 0.0f);
  for (const int token : {10, 11, 200}) keys[token] = 30;
  const World world(1, keys, {1});
  const HeadAttention measured = measure_attention(world.shape, world.window, bare_policy(), 1.0f);
  EXPECT_NEAR(measured.entropy[0], std::log(3), 1e-4);
  EXPECT_EQ(measured.modes[0], 2);  // blocks 0 and 3
  EXPECT_NEAR(measured.outside[0], 1, 1e-5);
  EXPECT_EQ(measured.sizes[0], 26);  // 10 % of 256
  const auto set = measured.set(0);
  const auto has = [&](int token) { return ((set[token / 64] >> (token % 64)) & 1u) != 0; };
  EXPECT_TRUE(has(10) && has(11) && has(200));
  EXPECT_TRUE(has(0) && has(24) && !has(25));  // all others are equal: the lower token wins
  EXPECT_NEAR(measured.shares_of(0)[10], 1.0 / 3, 1e-4);

  // With sinks that hold two of the three a third of the weight is outside.
  PolicyOptions policy = bare_policy();
  policy.sink = 12;
  EXPECT_NEAR(measure_attention(world.shape, world.window, policy, 1.0f).outside[0], 1.0 / 3, 1e-4);
}

TEST(Attention, EvenWeightIsOneRunOfBlocks) {
  const World even(1, std::vector<float>(256, 0.0f), {1});
  const HeadAttention measured = measure_attention(even.shape, even.window, bare_policy(), 1.0f);
  EXPECT_NEAR(measured.entropy[0], std::log(256), 1e-4);
  EXPECT_EQ(measured.modes[0], 1);  // four blocks of a quarter each touch
}

TEST(Sets, OverlapAndMissing) {
  const std::vector<uint64_t> a = {0b1111, 1}, b = {0b0110, 3};
  EXPECT_EQ(tokens_in_both(a, b), 3);
  EXPECT_EQ(tokens_missing(a, b, 128), 2);
  EXPECT_EQ(tokens_missing(a, b, 3), 1);
  EXPECT_EQ(tokens_missing(b, a, 65), 0);
  EXPECT_EQ(tokens_missing(b, a, 66), 1);
  HeadAttention two;
  two.words_per_set = 1;
  two.sets = {0b0011, 0b0110};
  two.sizes = {2, 2};
  EXPECT_DOUBLE_EQ(adjacent_overlap({&two, 1}), 1.0 / 3);
}

// Queries that turn by 30 degrees a step, from token to token.
World turning_world(int steps) {
  std::vector<float> queries, keys(2 * 200, 0.0f);
  for (int step = 0; step < steps; ++step) {
    const double angle = 3.14159265358979 / 6 * step;
    queries.push_back(static_cast<float>(std::cos(angle)));
    queries.push_back(static_cast<float>(std::sin(angle)));
  }
  // Keys all around the circle, so that sets turn with the queries.
  for (int t = 0; t < 200; ++t) {
    const double angle = 2 * 3.14159265358979 * t / 200;
    keys[2 * t] = static_cast<float>(8 * std::cos(angle));
    keys[2 * t + 1] = static_cast<float>(8 * std::sin(angle));
  }
  return World(2, keys, queries);
}

TEST(Difficulty, IsTheShareOfStepsBelowTheThreshold) {
  const World world = turning_world(12);
  const float one = 1, half = 0.5f, zero = 0;
  PolicyOptions policy = bare_policy();
  policy.eta = 0.9;  // cos 30 degrees is 0.866
  EXPECT_EQ(reuse_difficulty(world.shape, {&world.window, 1}, policy, {&one, 1}), 1);
  policy.eta = 0.8;
  EXPECT_EQ(reuse_difficulty(world.shape, {&world.window, 1}, policy, {&one, 1}), 0);
  policy.eta = 0.9;  // half the importance: between 0.9 and -1 in angle
  EXPECT_EQ(reuse_difficulty(world.shape, {&world.window, 1}, policy, {&half, 1}), 0);
  EXPECT_EQ(reuse_difficulty(world.shape, {&world.window, 1}, policy, {&zero, 1}), 0);
}

TEST(Trial, ComparesWithTheLabelNotWithTheStepBefore) {
  const World world = turning_world(13);
  PolicyOptions policy = bare_policy();
  const HeadAttention attention = measure_attention(world.shape, world.window, policy, 1.0f);
  const float one = 1;
  const auto trial_at = [&](double eta) {
    policy.eta = eta;
    return try_reuse(world.shape, {&world.window, 1}, {&attention, 1}, policy, {&one, 1});
  };
  // 30 and 60 degrees from the label are kept, 90 is not: every third step misses.
  const ReuseTrial loose = trial_at(0.45);
  EXPECT_DOUBLE_EQ(loose.hit_rate, 8.0 / 12);
  EXPECT_GT(loose.set_loss, 0.3);
  EXPECT_NEAR(loose.fetched, loose.new_on_miss * 4 / 12, 1e-9);
  const ReuseTrial strict = trial_at(0.99);
  EXPECT_EQ(strict.hit_rate, 0);
  EXPECT_EQ(strict.set_loss, 0);
  EXPECT_GT(strict.fetched, loose.fetched);
  policy.max_label_age = 1;
  EXPECT_NEAR(trial_at(0.45).hit_rate, 0.5, 1e-9);  // a label serves its next step alone
}

TEST(Split, HoldsOutEveryFourthWindowOrTheEndOfAnOnlyOne) {
  const World world = turning_world(100);
  const HeadAttention attention;
  // Indices of what is held out of so many windows.
  const auto held_out = [&](int64_t windows, int64_t runs) {
    const std::vector<HeadWindow> all(static_cast<size_t>(windows * runs), world.window);
    const std::vector<HeadAttention> facts(all.size(), attention);
    const SampleSplit split = split_samples(all, facts, runs);
    EXPECT_EQ(split.train.size() + split.held_out.size(), all.size());
    std::vector<int64_t> indices;
    for (const HeadSample& sample : split.held_out) {
      indices.push_back(sample.attention - facts.data());
      EXPECT_EQ(sample.first_step, 0);
      EXPECT_EQ(sample.end_step, 100);
    }
    return indices;
  };
  using Indices = std::vector<int64_t>;
  EXPECT_EQ(held_out(2, 1), (Indices{1}));
  EXPECT_EQ(held_out(4, 1), (Indices{3}));
  EXPECT_EQ(held_out(9, 1), (Indices{3, 7}));
  EXPECT_EQ(held_out(2, 3), (Indices{3, 4, 5}));  // a window with all its runs
  EXPECT_EQ(held_out(5, 2), (Indices{6, 7}));
  EXPECT_EQ(held_out(1, 3), (Indices{2}));  // of an only window runs take the windows' place
  EXPECT_EQ(held_out(1, 8), (Indices{3, 7}));
  const SampleSplit one = split_samples({&world.window, 1}, {&attention, 1}, 1);
  EXPECT_EQ(one.train[0].end_step, 75);
  EXPECT_EQ(one.held_out[0].first_step, 75 + kMaxLag);
  EXPECT_EQ(one.held_out[0].end_step, 100);
}

}  // namespace
}  // namespace clo
