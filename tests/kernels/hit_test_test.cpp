// Hit tests beside the cosine, on the device as on the CPU backend.
#include <cmath>

#include "kernels/refresh/refresh.h"
#include "kernels/refresh_fixture.h"

namespace clo::kernels {
namespace {

TEST_F(RefreshTest, DriftRefusesWhatTheCosineWouldKeep) {
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t group : {1, 3, 4, 8}) {
      for (const Aggregate aggregate : {Aggregate::kWeighted, Aggregate::kMean, Aggregate::kAll}) {
        Scene scene;
        scene.head_dim = head_dim;
        scene.group = group;
        scene.kv_heads = 3;
        scene.resident_of = 3;
        scene.policy.set_tokens = 300;
        scene.policy.threshold = -1;
        scene.policy.aggregate = aggregate;
        scene.policy.hit_test = HitTest::kDrift;
        // A step of 0.4 moves a query by 0.4 sqrt(head_dim): between the limits of the spreads.
        scene.policy.drift_limit = 0.125 * 0.4 * std::sqrt(head_dim) * 0.9;
        const KvCounters total = walk(scene, kSteps);
        if (HasFatalFailure()) return;
        EXPECT_GT(total.hits, 0);
        EXPECT_GT(total.misses, 2);
      }
    }
  }
}

// Rises of 0.25 (heads 0 and 3), 0.75 and none known: by the true query head 1 is refused, by a
// prediction, which has 0.2, also 0 and 3.
Scene entropy_scene(Predict predict) {
  Scene scene;
  scene.kv_heads = 4;
  scene.policy.set_tokens = 300;
  scene.policy.threshold = -1;
  scene.policy.max_label_age = 0;
  scene.policy.predict = predict;
  scene.policy.correction = predict == Predict::kNone ? Correction::kNone : Correction::kTrueQuery;
  scene.policy.prefetch_margin = 0.6;
  scene.policy.hit_test = HitTest::kEntropy;
  scene.policy.entropy_rise = 0.5;
  return scene;
}

TEST_F(RefreshTest, EntropyRefusesWhatTheCosineWouldKeep) {
  for (const int32_t group : {1, 3, 4, 8}) {
    for (const Aggregate aggregate : {Aggregate::kWeighted, Aggregate::kMean, Aggregate::kAll}) {
      Scene scene = entropy_scene(Predict::kNone);
      scene.head_dim = group % 2 == 0 ? 128 : 64;
      scene.group = group;
      scene.resident_of = 4;
      scene.policy.aggregate = aggregate;
      const KvCounters total = walk(scene, kSteps);
      if (HasFatalFailure()) return;
      // Head 1, which is resident, is refused at every context but those of its own set.
      EXPECT_EQ(total.resident_selections, 6);
      EXPECT_EQ(total.misses, 3);
      EXPECT_EQ(total.hits, 3 * 5);
    }
  }
}

// A prediction by the layer before goes by the entropy of the last step, stricter where the true
// query may refute it.
TEST_F(RefreshTest, EntropyRefusesPredictionsByLayer) {
  Scene scene = entropy_scene(Predict::kPreviousLayer);
  World world(scene);
  std::vector<float> queries = world.next_queries(0.3f);
  EXPECT_EQ(world.cpu_refresh(queries, scene.context, World::How::kDecide), 4);
  now(world, queries, scene.context, 3);
  world.expect_equal("first sets");
  if (HasFatalFailure()) return;
  queries = world.next_queries(0.3f);
  world.set_num_tokens(scene.context);
  const DeviceArray<float> predicted(queries);
  decide_ahead({world.tables(), predicted.data(), kLayer, 1}, nullptr);
  world.drain(3);
  CLO_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(world.cpu_refresh(queries, scene.context + 1, World::How::kForesee), 3);
  world.expect_equal("foreseen");
  if (HasFatalFailure()) return;
  // Heads 0, 1 and 3 have sets that nothing has attended to; head 2's entropies are unknown.
  EXPECT_EQ(world.cpu_refresh(queries, scene.context + 1, World::How::kCorrect), 0);
  now(world, queries, scene.context + 1, 3);
  world.expect_equal("corrected");
}

// What the step before foresees is attention's to refuse (AttendTest), once it has attended.
TEST_F(RefreshTest, EntropyLeavesTheNextStepToAttention) {
  Scene scene = entropy_scene(Predict::kPreviousStep);
  World world(scene);
  now(world, world.next_queries(0.3f), scene.context, 3);
  EXPECT_EQ(world.device_counters(0).misses, 4u);
  now(world, world.next_queries(0.3f), scene.context + 1, 3);
  const DeviceCounters counted = world.device_counters(0);
  EXPECT_EQ(counted.corrections, 1u);  // head 1, whose entropy has risen too far for the true query
  EXPECT_EQ(counted.misses, 4u);
  EXPECT_EQ(counted.hits, 8u);
  for (int32_t h = 0; h < scene.kv_heads; ++h) {
    EXPECT_EQ(world.decided(0, h), h == 1 ? kKeptAhead | kChosenNow : kKeptAhead);
  }
}

}  // namespace
}  // namespace clo::kernels
