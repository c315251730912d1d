// What the host works out for the kernels; needs no device.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/buffers.h"
#include "cuda/slot_table.h"
#include "model/shapes.h"
#include "reuse/reuse_rule.h"

namespace clo {
namespace {

TEST(HeadRule, SaysWhatTheReuseRuleSays) {
  const std::vector<float> importance = {0.2f, 0.9f, 0.5f};
  for (const Aggregate aggregate : {Aggregate::kMean, Aggregate::kWeighted, Aggregate::kAll}) {
    PolicyOptions policy;
    policy.aggregate = aggregate;
    const kernels::HeadRule rule = head_rule(policy, importance);
    for (const float cosine : {-1.0f, -0.5f, 0.0f, 0.3f, 0.6f, 0.8f, 0.95f, 1.0f}) {
      const std::vector<float> cosines = {cosine, cosine * 0.9f, 1.0f};
      bool same = true;
      if (aggregate == Aggregate::kAll) {
        for (size_t j = 0; j < 3; ++j) same = same && cosines[j] >= rule.at_once.query[j];
      } else {
        double sum = 0, weights = 0;
        for (size_t j = 0; j < 3; ++j) {
          sum += rule.weight[j] * cosines[j];
          weights += rule.weight[j];
        }
        const double tau = rule.at_once.mean;
        same = tau <= -1 || (tau <= 1 && sum / weights >= tau);
      }
      EXPECT_EQ(same, similar_enough(policy, cosines, importance)) << cosine;
    }
    // A prediction is stricter only where the true query may refute it.
    EXPECT_EQ(rule.ahead.mean, rule.at_once.mean);
    policy.correction = Correction::kTrueQuery;
    const kernels::HeadRule corrected = head_rule(policy, importance);
    EXPECT_EQ(corrected.at_once.mean, rule.at_once.mean);
    EXPECT_EQ(corrected.ahead.mean, ahead_threshold(rule.at_once.mean, policy.prefetch_margin));
    EXPECT_GT(corrected.ahead.mean, rule.ahead.mean);
    EXPECT_GT(corrected.ahead.query[1], rule.ahead.query[1]);
  }
}

// Half the angle is what a dial at one half leaves of every threshold.
TEST(HeadRule, FollowsTheDial) {
  const std::vector<float> importance = {0.2f, 0.9f, 0.5f};
  PolicyOptions policy;
  policy.correction = Correction::kTrueQuery;
  for (const Aggregate aggregate : {Aggregate::kMean, Aggregate::kWeighted, Aggregate::kAll}) {
    policy.aggregate = aggregate;
    const kernels::HeadRule whole = head_rule(policy, importance, 1);
    const kernels::HeadRule half = head_rule(policy, importance, 0.5);
    const auto halved = [](double tau) { return std::cos(std::acos(tau) / 2); };
    EXPECT_NEAR(half.at_once.mean, halved(whole.at_once.mean), 1e-12);
    EXPECT_NEAR(half.ahead.mean, halved(whole.ahead.mean), 1e-12);
    for (size_t j = 0; j < importance.size(); ++j) {
      EXPECT_NEAR(half.at_once.query[j], halved(whole.at_once.query[j]), 1e-12);
      EXPECT_NEAR(half.ahead.query[j], halved(whole.ahead.query[j]), 1e-12);
      EXPECT_EQ(half.weight[j], whole.weight[j]);
    }
  }
}

TEST(RefreshClusters, LeaveRoomForTheLayers) {
  CudaLimits limits;
  // More where a step waits for rows and not for its products.
  EXPECT_EQ(refresh_clusters(limits, false, 132), 24);
  EXPECT_EQ(refresh_clusters(limits, true, 132), 32);
  EXPECT_EQ(refresh_clusters(limits, false, 78), 19);
  EXPECT_EQ(refresh_clusters(limits, true, 16), 4);
  EXPECT_EQ(refresh_clusters(limits, false, 1), 1);
  limits.queue_clusters = 7;
  EXPECT_EQ(refresh_clusters(limits, true, 132), 7);
}

TEST(StepPlans, FillTheDeviceForPublishedShapes) {
  for (const std::string& name : shape_names()) {
    const ModelConfig c = model_shape(name).value();
    const int64_t q = c.num_q_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
    for (const WeightBlocks blocks :
         {WeightBlocks::kNone, WeightBlocks::kInt8, WeightBlocks::kQ4}) {
      EXPECT_EQ(plan_product(blocks, c.vocab_size, c.hidden_size, {}, 1).splits, 1) << name;
      for (const auto& [outputs, inputs] : {std::pair(q + 2 * kv, c.hidden_size),
                                            {q, c.hidden_size},
                                            {c.hidden_size, q},
                                            {2 * c.intermediate_size, c.hidden_size},
                                            {c.hidden_size, c.intermediate_size}}) {
        const kernels::SkinnyPlan plan = plan_product(blocks, outputs, inputs, {});
        EXPECT_LE(plan.splits, 8) << name << " " << kernels::describe(plan);
        // A multiprocessor idles only where there is no piece of work for it.
        EXPECT_EQ(plan.grid, std::min<int64_t>(kernels::skinny_items(plan, outputs), 132))
            << name << " " << kernels::describe(plan);
      }
    }
  }
}

TEST(Workspace, GrowsWithWhatIsAskedFor) {
  const ModelConfig config = model_shape("llama3-8b").value();
  KvShape shape{32, 32, 8, 128, DType::kBF16, 128};
  CudaLimits limits{.max_batch = 1, .chunk_rows = 512, .max_context_tokens = 131072};
  const int64_t small = CudaBackend::workspace_bytes(config, shape, limits);
  limits.chunk_rows = 131072;
  const int64_t large = CudaBackend::workspace_bytes(config, shape, limits);
  EXPECT_GT(large, small);
  EXPECT_LT(large, int64_t{12} << 30);
  EXPECT_EQ(CudaBackend::largest_chunk(config, shape, limits, 131072, large), 131072);
  EXPECT_LT(CudaBackend::largest_chunk(config, shape, limits, 131072, large - 1), 131072);
}

}  // namespace
}  // namespace clo
