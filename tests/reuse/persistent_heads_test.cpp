#include "reuse/persistent_heads.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>

namespace clo {
namespace {

using Persistent = PolicyOptions::Persistent;
using Flags = std::vector<uint8_t>;

const KvShape kShape{3, 4, 2, 16, DType::kF32, 64};  // three layers of two KV heads

PolicyOptions policy_of(Persistent persistent) {
  PolicyOptions policy;
  policy.persistent = persistent;
  return policy;
}

Flags choose(const PolicyOptions& policy, std::vector<float> difficulty = {},
             int64_t budget_heads = 0) {
  auto chosen = choose_resident_heads(policy, kShape, difficulty, budget_heads);
  EXPECT_TRUE(chosen) << chosen.error().to_string();
  return chosen ? *chosen : Flags{};
}

TEST(PersistentHeads, AllAndDenseLayers) {
  EXPECT_EQ(choose(policy_of(Persistent::kAll)), Flags(6, 1));
  PolicyOptions policy = policy_of(Persistent::kFillBudget);
  EXPECT_EQ(choose(policy), Flags(6, 0));
  policy.dense_layers = 2;
  EXPECT_EQ(choose(policy), (Flags{1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(num_dense_heads(policy, kShape), 4);
  policy.dense_layers = 9;  // more layers than there are
  EXPECT_EQ(choose(policy), Flags(6, 1));
  EXPECT_EQ(num_dense_heads(policy, kShape), 6);
  policy.dense_layers = -1;
  EXPECT_EQ(choose(policy), Flags(6, 1));
  policy.dense_layers = 0;
  policy.select = Select::kNone;  // nothing is chosen, so every layer is dense
  EXPECT_EQ(choose(policy), Flags(6, 1));
}

TEST(PersistentHeads, PerLayerTakesTheHardestOfEachLayer) {
  PolicyOptions policy = policy_of(Persistent::kPerLayer);
  policy.persistent_per_layer = 1;
  EXPECT_EQ(choose(policy), (Flags{1, 0, 1, 0, 1, 0}));
  EXPECT_EQ(choose(policy, {.1f, .2f, .9f, .3f, .5f, .5f}), (Flags{0, 1, 1, 0, 1, 0}));
  policy.persistent_per_layer = 0;
  EXPECT_EQ(choose(policy), Flags(6, 0));
  // A dense layer's heads are there anyway and use nothing of the count.
  policy.persistent_per_layer = 1;
  policy.dense_layers = 1;
  EXPECT_EQ(choose(policy, {.1f, .2f, .9f, .3f, .4f, .5f}), (Flags{1, 1, 1, 0, 0, 1}));
  EXPECT_EQ(num_fixed_persistent_heads(policy, kShape), 2);
}

TEST(PersistentHeads, MorePerLayerThanThereAreIsRefused) {
  PolicyOptions policy = policy_of(Persistent::kPerLayer);
  policy.persistent_per_layer = kShape.num_kv_heads;
  EXPECT_EQ(choose(policy), Flags(6, 1));
  policy.persistent_per_layer = kShape.num_kv_heads + 1;
  const auto refused = choose_resident_heads(policy, kShape, {}, 0);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadFlag);
  EXPECT_EQ(refused.error().where, "--persistent-heads");
  EXPECT_NE(refused.error().message.find("at most 2"), std::string::npos);
  EXPECT_NE(refused.error().message.find("found 3"), std::string::npos);
}

TEST(PersistentHeads, OnlyHashSelectionInSomeLayerReadsCodes) {
  KvShape shape = kShape;
  shape.code_bits = 128;
  PolicyOptions policy = policy_of(Persistent::kAll);
  policy.dense_layers = 0;
  for (const Select select :
       {Select::kNone, Select::kHash, Select::kGradedHash, Select::kExact, Select::kRandom}) {
    policy.select = select;
    EXPECT_EQ(reads_codes(policy, shape), selects_by_code(select));
  }
  policy.select = Select::kHash;
  policy.dense_layers = shape.num_layers - 1;
  EXPECT_TRUE(reads_codes(policy, shape));
  for (const int32_t dense : {shape.num_layers, -1}) {
    policy.dense_layers = dense;
    EXPECT_FALSE(reads_codes(policy, shape));
  }
  policy.dense_layers = 0;
  shape.code_bits = 0;
  EXPECT_FALSE(reads_codes(policy, shape));
}

TEST(PersistentHeads, AListNamesThem) {
  PolicyOptions policy = policy_of(Persistent::kList);
  policy.persistent_heads = {{2, 1}, {0, 0}, {2, 1}};
  EXPECT_EQ(choose(policy), (Flags{1, 0, 0, 0, 0, 1}));
  EXPECT_EQ(num_fixed_persistent_heads(policy, kShape), 2);
  policy.persistent_heads = {};
  EXPECT_EQ(choose(policy), Flags(6, 0));
}

TEST(PersistentHeads, AListedHeadThatDoesNotExistIsRefusedByName) {
  for (const auto& [layer, head] : {std::pair{3, 0}, {0, 2}, {-1, 0}, {0, -1}, {2147483647, 0}}) {
    PolicyOptions policy = policy_of(Persistent::kList);
    policy.persistent_heads = {{0, 0}, {layer, head}};
    const auto refused = choose_resident_heads(policy, kShape, {}, 0);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kBadFlag);
    EXPECT_EQ(refused.error().where, "--persistent-heads");
    const std::string name = std::to_string(layer) + ":" + std::to_string(head);
    EXPECT_NE(refused.error().message.find("head " + name), std::string::npos);
    EXPECT_NE(refused.error().message.find("layers 0 to 2"), std::string::npos);
  }
}

TEST(PersistentHeads, FillTakesTheHardestFirst) {
  const PolicyOptions policy = policy_of(Persistent::kFillBudget);
  // Without a profile: layer, head order.
  EXPECT_EQ(choose(policy, {}, 3), (Flags{1, 1, 1, 0, 0, 0}));
  const std::vector<float> difficulty = {.1f, .6f, .3f, .6f, .2f, .9f};
  EXPECT_EQ(choose(policy, difficulty, 1), (Flags{0, 0, 0, 0, 0, 1}));
  // Equals in layer, head order.
  EXPECT_EQ(choose(policy, difficulty, 2), (Flags{0, 1, 0, 0, 0, 1}));
  EXPECT_EQ(choose(policy, difficulty, 3), (Flags{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(choose(policy, difficulty, 100), Flags(6, 1));
  EXPECT_EQ(choose(policy, difficulty, -5), Flags(6, 0));
  EXPECT_EQ(choose(policy, std::vector<float>(6, .5f), 2), (Flags{1, 1, 0, 0, 0, 0}));
}

TEST(PersistentHeads, FillSpendsNothingOnDenseLayers) {
  PolicyOptions policy = policy_of(Persistent::kFillBudget);
  policy.dense_layers = 1;
  EXPECT_EQ(choose(policy, {}, 1), (Flags{1, 1, 1, 0, 0, 0}));
  EXPECT_EQ(choose(policy, {.9f, .8f, .1f, .2f, .3f, .4f}, 2), (Flags{1, 1, 0, 0, 1, 1}));
  EXPECT_EQ(num_fixed_persistent_heads(policy, kShape), 0);
}

RC_GTEST_PROP(PersistentHeads, FillingIsTheTopOfTheOrder, ()) {
  const PolicyOptions policy = policy_of(Persistent::kFillBudget);
  std::vector<float> difficulty;
  for (int i = 0; i < 6; ++i) {
    difficulty.push_back(static_cast<float>(*rc::gen::inRange(0, 4)));  // ties are common
  }
  const auto budget = *rc::gen::inRange<int64_t>(0, 8);
  const auto chosen = choose_resident_heads(policy, kShape, difficulty, budget);
  RC_ASSERT(bool{chosen});
  RC_ASSERT(std::accumulate(chosen->begin(), chosen->end(), int64_t{0}) ==
            std::min<int64_t>(budget, 6));
  for (size_t in = 0; in < 6; ++in) {
    for (size_t out = 0; out < 6; ++out) {
      if (!(*chosen)[in] || (*chosen)[out]) continue;
      RC_ASSERT(difficulty[in] > difficulty[out] ||
                (difficulty[in] == difficulty[out] && in < out));
    }
  }
}

}  // namespace
}  // namespace clo
