#include "profile/train_hash.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "profile/matrix.h"
#include "reference/cpu_ops.h"
#include "select/hash_signs.h"

namespace clo {
namespace {

TEST(Matrix, ProductAndTransposeAreThose) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  constexpr int64_t kM = 51, kK = 37, kN = 48;
  std::vector<float> a(kM * kK), b(kK * kN), c(kM * kN), turned(kN * 64);
  for (float& x : a) x = normal(random);
  for (float& x : b) x = normal(random);
  multiply(a.data(), b.data(), c.data(), kM, kK, kN);
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t j = 0; j < kN; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < kK; ++k) sum += double{a[i * kK + k]} * b[k * kN + j];
      ASSERT_NEAR(c[i * kN + j], sum, 1e-4) << i << " " << j;
    }
  }
  transpose(c.data(), kM, kN, turned.data(), 64);
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t j = 0; j < kN; ++j) ASSERT_EQ(turned[j * 64 + i], c[i * kN + j]);
  }
  for (int64_t j = 0; j < kN; ++j) ASSERT_EQ(turned[j * 64 + 63], 0);
}

// Whole numbers have exact sums on both ways, zeros among them.
TEST(Projection, WrittenAsWeightsGivesTheSameCodes) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> digit(-9, 9);
  for (const int32_t dim : {48, 64, 128}) {
    for (const int32_t bits : {64, 128, 256}) {
      const KvShape shape{2, 2, 2, dim, DType::kF32, bits};
      const HashSigns signs(shape, kHashSeed);
      const HashParams transform = signs.params(1, 1);
      std::vector<float> matrix = projection_matrix(transform);
      for (const float w : matrix) ASSERT_EQ(bf16_to_f32(f32_to_bf16(w)), w);
      HashParams product = transform;
      product.weights = matrix.data();
      for (int i = 0; i < 200; ++i) {
        std::vector<float> x(dim), scratch(kMaxHeadDim);
        for (float& value : x) value = static_cast<float>(digit(random));
        std::vector<uint64_t> a(bits / 64), b(bits / 64);
        encode_row(simd_table(), transform, x.data(), true, a.data(), scratch.data());
        encode_row(simd_table(), product, x.data(), true, b.data(), scratch.data());
        ASSERT_EQ(a, b) << dim << " " << bits;
        encode_row(simd_table(), product, x.data(), false, b.data(), scratch.data());
        ASSERT_EQ(a, b) << dim << " " << bits;
      }
    }
  }
}

// Keys and queries that share a large constant part and differ in a few directions, as the keys of
// real heads do: a random projection spends its bits on what tells no key from another.
struct LowRank {
  static constexpr int64_t kTokens = 700, kSteps = 64;
  static constexpr int32_t kDim = 64, kGroup = 2, kRank = 6;
  std::vector<float> keys, queries;
  HeadShape shape{kGroup, kDim};
  HeadWindow window;
  PolicyOptions policy;
  HeadAttention attention;

  explicit LowRank(uint32_t seed) {
    std::mt19937 basis(5), random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> directions(kRank * kDim), constant(kDim);
    for (float& x : directions) x = normal(basis) / 8;
    for (float& x : constant) x = normal(basis);
    const auto rows = [&](int64_t count, std::vector<float>& out) {
      for (int64_t r = 0; r < count; ++r) {
        std::vector<float> row = constant;
        for (int i = 0; i < kRank; ++i) {
          const float share = 2 * normal(random);
          for (int d = 0; d < kDim; ++d) row[d] += share * directions[i * kDim + d];
        }
        for (float& x : row) x += 0.1f * normal(random);
        out.insert(out.end(), row.begin(), row.end());
      }
    };
    rows(kTokens, keys);
    rows(kGroup * kSteps, queries);
    window.keys = keys;
    window.queries = queries;
    window.num_tokens = kTokens;
    window.num_steps = kSteps;
    window.first_context = kTokens - kSteps + 1;
    attention = measure_attention(shape, window, policy, 0.5f);
  }
  HeadSample sample() const { return {window, &attention, 0, kSteps}; }
};

TEST(Training, FindsMoreOfTheExactSetThanTheRandomProjection) {
  const LowRank seen(1), unseen(2);
  const HeadSample train = seen.sample(), held_out = unseen.sample();
  for (const int32_t bits : {64, 128, 256}) {
    const KvShape shape{1, 2, 1, 64, DType::kF32, bits};
    const HashSigns signs(shape, kHashSeed);
    const std::vector<float> random = projection_matrix(signs.params(0, 0));
    HashTraining training;
    training.bits = bits;
    training.iterations = 150;
    const std::vector<float> trained =
        train_hash(seen.shape, {&train, 1}, seen.policy, random, training);
    const auto recall = [&](const std::vector<float>& weights) {
      return hash_recall(seen.shape, {&held_out, 1}, seen.policy, weights, bits);
    };
    const Recall before = recall(random), after = recall(trained);
    EXPECT_GT(after.tokens, 1.5 * before.tokens) << bits;
    EXPECT_GT(after.weight, before.weight) << bits;
    EXPECT_LE(after.weight, 1) << bits;
    for (const float w : trained) ASSERT_EQ(bf16_to_f32(f32_to_bf16(w)), w);
    // The same again, bit for bit.
    EXPECT_EQ(trained, train_hash(seen.shape, {&train, 1}, seen.policy, random, training));
  }
}

TEST(Training, ThePublishedRecipeRunsAndIsDeterministic) {
  const LowRank seen(1);
  const HeadSample train = seen.sample();
  HashTraining training;
  training.recipe = HashRecipe::kPublished;
  training.bits = 64;
  const std::vector<float> weights = train_hash(seen.shape, {&train, 1}, seen.policy, {}, training);
  EXPECT_EQ(weights.size(), 65u * 64);
  for (const float w : weights) ASSERT_TRUE(std::isfinite(w));
  EXPECT_EQ(weights, train_hash(seen.shape, {&train, 1}, seen.policy, {}, training));
}

// Two queries of a group: one asks strongly for what only it wants, the other weakly for the
// opposite. Their codes cancel out; their sum does not.
TEST(Recall, GradedQueriesSayHowMuchABitMatters) {
  const int64_t tokens = 300;
  std::vector<float> keys(tokens * 64, 0.0f), queries(2 * 64, 0.0f), weights(65 * 64, 0.0f);
  for (int64_t t = 0; t < tokens; ++t) keys[t * 64] = t >= 200 && t < 230 ? 1.0f : -1.0f;
  queries[0] = 4;
  queries[64] = -1;
  weights[0] = 1;
  HeadWindow window;
  window.keys = keys;
  window.queries = queries;
  window.num_tokens = window.first_context = tokens;
  window.num_steps = 1;
  const HeadShape shape{2, 64};
  PolicyOptions policy;
  const HeadAttention attention = measure_attention(shape, window, policy, 1.0f);
  const HeadSample sample = {window, &attention, 0, 1};
  EXPECT_EQ(hash_recall(shape, {&sample, 1}, policy, weights, 64).tokens, 1);
  policy.select = Select::kHash;
  EXPECT_EQ(hash_recall(shape, {&sample, 1}, policy, weights, 64).tokens, 0);
}

TEST(Recall, IsOneForTheExactOrderAndWhatIsFoundOtherwise) {
  // One bit of 64 tells the tokens of the set from the others.
  const int64_t tokens = 300;
  std::vector<float> keys(tokens * 64, 0.0f), query(64, 0.0f), weights(65 * 64, 0.0f);
  for (int64_t t = 0; t < tokens; ++t) keys[t * 64] = t >= 100 && t < 130 ? 1.0f : -1.0f;
  query[0] = 1;
  weights[0] = 1;
  HeadWindow window;
  window.keys = keys;
  window.queries = query;
  window.num_tokens = window.first_context = tokens;
  window.num_steps = 1;
  const HeadShape shape{1, 64};
  const PolicyOptions policy;
  const HeadAttention attention = measure_attention(shape, window, policy, 1.0f);
  ASSERT_EQ(attention.sizes[0], 30);
  const HeadSample sample = {window, &attention, 0, 1};
  EXPECT_EQ(product_recall(shape, {&sample, 1}, policy).tokens, 1);
  PolicyOptions policies[2];
  policies[1].select = Select::kHash;
  for (const PolicyOptions& of : policies) {
    const auto recall = [&] { return hash_recall(shape, {&sample, 1}, of, weights, 64); };
    weights[0] = 1;
    EXPECT_EQ(recall().tokens, 1);
    weights[64 * 64] = 2;  // a bias that no key is below: no bit tells anything
    EXPECT_EQ(recall().tokens, 0);
    weights[64 * 64] = 0.5f;
    EXPECT_EQ(recall().tokens, 1);
    weights[64 * 64] = 0;
    weights[0] = 0;  // nor without weights: the first candidates are taken
    EXPECT_EQ(recall().tokens, 0);
    EXPECT_EQ(recall().weight, 0);
  }
}

}  // namespace
}  // namespace clo
