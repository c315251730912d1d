#pragma once
// What a test of the refresh kernels is about: shapes and a policy, and the policy as the device
// has it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "clo/policy.h"
#include "clo/report.h"
#include "kernels/decode_tables.h"
#include "reuse/reuse_rule.h"

namespace clo::kernels {
inline namespace refresh_world {  // other tests have worlds of their own

inline constexpr int32_t kLayers = 2;
inline constexpr int32_t kLayer = 1;
inline constexpr float kScale = 0.125f;

struct Scene {
  int32_t head_dim = 128;
  int32_t group = 4;
  int32_t kv_heads = 2;
  int32_t code_bits = 128;
  int64_t context = 1000;  // of the first step
  PolicyOptions policy;
  int32_t num_slots = 1;
  DType type = DType::kBF16;
  bool trained = false;              // codes by a trained projection
  int64_t resident_of = 0;           // head h is resident when h % resident_of == 1; 0: none
  std::vector<int32_t> first_pages;  // of the store, in the sequence's order; the rest anywhere
};

inline PolicyOptions always() {
  PolicyOptions policy;
  policy.threshold = 2;
  return policy;
}

inline SequenceRules to_rules(const PolicyOptions& p) {
  SequenceRules r;
  r.kv_ratio = p.kv_ratio;
  r.set_tokens = p.set_tokens;
  r.random_seed = 77;
  r.sink = p.sink;
  r.recent = p.recent;
  r.max_label_age = p.max_label_age;
  r.dense_layers = p.dense_layers;
  r.select = p.select == Select::kExact    ? SelectRule::kExact
             : p.select == Select::kRandom ? SelectRule::kRandom
             : p.select == Select::kNone   ? SelectRule::kNone
             : p.select == Select::kHash   ? SelectRule::kHash
                                           : SelectRule::kGradedHash;
  r.predict = p.predict == Predict::kPreviousLayer  ? PredictRule::kPreviousLayer
              : p.predict == Predict::kPreviousStep ? PredictRule::kPreviousStep
                                                    : PredictRule::kNone;
  r.correct = p.correction == Correction::kTrueQuery;
  r.fetch_whole = p.fetch == Fetch::kWhole;
  if (p.hit_test == HitTest::kDrift) {
    r.drift_limit = static_cast<float>(p.drift_limit);
    r.drift_limit_ahead = static_cast<float>((1 - prefetch_margin(p)) * p.drift_limit);
  }
  if (p.hit_test == HitTest::kEntropy) {
    r.entropy_rise = static_cast<float>(p.entropy_rise);
    r.entropy_rise_ahead = static_cast<float>((1 - prefetch_margin(p)) * p.entropy_rise);
  }
  r.aggregate_all = p.aggregate == Aggregate::kAll;
  return r;
}

// What is said of a head's keys, whatever they are.
inline float spread_of(int32_t kv_head) { return 0.4f + 0.3f * static_cast<float>(kv_head % 3); }

// What attention is said to have noted of a head: rises of less than a nat, of every third head
// nothing yet.
inline HeadEntropy entropy_of(int32_t kv_head) {
  HeadEntropy entropy;
  for (int32_t g = 0; g < kMaxGroup; ++g) {
    entropy.at_label[g] = kv_head % 3 == 2 ? NAN : 1.0f;
    entropy.last[g] =
        1.25f + 0.5f * static_cast<float>(kv_head % 3) + 0.01f * static_cast<float>(g);
  }
  return entropy;
}

// Attention::refused.
inline bool refused_in(const Scene& scene, const HeadTask& task, std::span<const float> importance,
                       double margin) {
  const PolicyOptions& policy = scene.policy;
  const bool by_entropy = policy.hit_test == HitTest::kEntropy;
  if (policy.hit_test == HitTest::kCosine) return false;
  if (by_entropy && task.head->state->label_length == task.context_tokens) return false;
  const auto dim = static_cast<size_t>(scene.head_dim);
  const HeadEntropy entropy = entropy_of(task.kv_head);
  std::vector<float> moved;
  for (size_t g = 0; g < importance.size(); ++g) {
    moved.push_back(by_entropy ? entropy.last[g] - entropy.at_label[g]
                               : score_drift({task.query + g * dim, dim},
                                             {task.head->label + g * dim, dim},
                                             spread_of(task.kv_head), kScale));
  }
  const double limit = by_entropy ? policy.entropy_rise : policy.drift_limit;
  return group_mean(policy, moved, importance) > (1 - margin) * limit;
}

inline HeadRule to_head_rule(const PolicyOptions& p, std::span<const float> importance,
                             int32_t kv_head) {
  HeadRule rule;
  rule.drift_scale = kScale * spread_of(kv_head);
  float largest = 0;
  double total = 0;
  for (size_t j = 0; j < importance.size(); ++j) {
    rule.at_once.query[j] = head_threshold(p, importance[j]);
    rule.ahead.query[j] = ahead_threshold(rule.at_once.query[j], prefetch_margin(p));
    rule.weight[j] = p.aggregate == Aggregate::kWeighted ? double{importance[j]} : 1.0;
    largest = std::max(largest, importance[j]);
    total += importance[j];
  }
  rule.at_once.mean =
      head_threshold(p, p.aggregate == Aggregate::kWeighted
                            ? largest
                            : static_cast<float>(total / static_cast<double>(importance.size())));
  rule.ahead.mean = ahead_threshold(rule.at_once.mean, prefetch_margin(p));
  return rule;
}

inline void expect_same_counts(const DeviceCounters& d, const KvCounters& c,
                               const std::string& where) {
  EXPECT_EQ(static_cast<int64_t>(d.hits), c.hits) << where;
  EXPECT_EQ(static_cast<int64_t>(d.misses), c.misses) << where;
  EXPECT_EQ(static_cast<int64_t>(d.aged), c.aged) << where;
  EXPECT_EQ(static_cast<int64_t>(d.incomplete), c.incomplete) << where;
  EXPECT_EQ(static_cast<int64_t>(d.corrections), c.corrections) << where;
  EXPECT_EQ(static_cast<int64_t>(d.resident_selections), c.resident_selections) << where;
  EXPECT_EQ(static_cast<int64_t>(d.rows_requested), c.rows_requested) << where;
  EXPECT_EQ(static_cast<int64_t>(d.rows_fetched), c.rows_fetched) << where;
  EXPECT_EQ(static_cast<int64_t>(d.rows_saved_by_delta), c.rows_saved_by_delta) << where;
  EXPECT_EQ(static_cast<int64_t>(d.rows_saved_by_hits), c.rows_saved_by_hits) << where;
  EXPECT_EQ(static_cast<int64_t>(d.oracle_rows), c.oracle_rows) << where;
}

}  // namespace refresh_world
}  // namespace clo::kernels
