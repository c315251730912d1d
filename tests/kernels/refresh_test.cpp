// The refresh kernels against the CPU backend: the same decisions, sets, slots, maps, bits, states,
// rows and counters, over runs of consecutive contexts.
#include "kernels/refresh/refresh.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "kernels/refresh/spread.h"
#include "kernels/refresh_fixture.h"

namespace clo::kernels {
namespace {

TEST_F(RefreshTest, HashSetsEqualTheCpuForEveryShape) {
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t group : {1, 2, 3, 4, 5, 7, 8}) {
      for (const Select select : {Select::kHash, Select::kGradedHash}) {
        Scene scene;
        scene.head_dim = head_dim;
        scene.group = group;
        scene.kv_heads = group == 4 ? 8 : group % 3 + 1;
        scene.policy = always();
        scene.policy.select = select;
        scene.policy.set_tokens = 300;
        walk(scene, kSteps);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RefreshTest, EveryContextLength) {
  for (const int64_t context :
       {65, 68, 69, 70, 255, 256, 257, 323, 324, 325, 580, 1000, 5000, 70000}) {
    for (const bool small : {false, true}) {
      Scene scene;
      scene.context = context;
      scene.kv_heads = context > 10000 ? 1 : 2;
      scene.policy = always();
      if (small) scene.policy.set_tokens = 40;
      walk(scene, kSteps);
      if (HasFatalFailure()) return;
    }
  }
}

// Rows of one layer on both sides of 2^31 elements and 2^32 bytes.
TEST_F(RefreshTest, StoresBeyondThirtyOneBits) {
  Scene scene;
  scene.kv_heads = 8;
  scene.group = 1;
  scene.policy = always();
  scene.policy.set_tokens = 300;
  constexpr int32_t kBoundary = 4096;  // pages of 8 heads, 256 rows, 256 elements
  scene.first_pages = {kBoundary, 0, kBoundary - 1, kBoundary + 1, 1};
  const KvCounters counted = walk(scene, kSteps);
  EXPECT_GT(counted.rows_fetched, 0);
}

TEST_F(RefreshTest, CodeWidths) {
  for (const int32_t bits : {64, 128, 192, 256, 320, 448, 512}) {
    for (const bool trained : {false, true}) {
      for (const Select select : {Select::kHash, Select::kGradedHash}) {
        Scene scene;
        scene.head_dim = bits == 192 ? 64 : 128;
        scene.code_bits = bits;
        scene.trained = trained;
        scene.context = 3000;
        scene.policy = always();
        scene.policy.select = select;
        walk(scene, kSteps);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RefreshTest, WholeFetchAndResidentHeads) {
  for (const Fetch fetch : {Fetch::kDelta, Fetch::kWhole}) {
    Scene scene;
    scene.context = 1500;
    scene.kv_heads = 3;
    scene.resident_of = 2;
    scene.num_slots = 2;
    scene.policy = always();
    scene.policy.fetch = fetch;
    walk(scene, kSteps);
  }
}

TEST_F(RefreshTest, ExactAndRandomSets) {
  for (const Select select : {Select::kExact, Select::kRandom}) {
    for (const int32_t head_dim : {64, 128}) {
      Scene scene;
      scene.head_dim = head_dim;
      scene.context = 3000;
      scene.kv_heads = 3;
      scene.group = head_dim == 64 ? 7 : 2;
      scene.resident_of = 2;
      scene.type = head_dim == 64 ? DType::kF16 : DType::kBF16;
      scene.policy = always();
      scene.policy.select = select;
      walk(scene, kSteps);
      if (HasFatalFailure()) return;
    }
  }
}

// A set that shrinks leaves holes, which the next ones fill.
TEST_F(RefreshTest, HolesAreFilled) {
  Scene scene;
  scene.context = 4000;
  scene.policy = always();
  scene.policy.kv_ratio = 0.2;
  const int64_t growth[] = {0, -1500, 10, 1400, 200, -2500, 2300};
  EXPECT_GT(walk(scene, growth).rows_saved_by_delta, 0);
}

TEST_F(RefreshTest, ReuseRule) {
  for (const Aggregate aggregate : {Aggregate::kWeighted, Aggregate::kMean, Aggregate::kAll}) {
    Scene scene;
    scene.context = 2000;
    scene.kv_heads = 8;
    scene.num_slots = 2;
    scene.policy.aggregate = aggregate;
    // A mean asks less of a group with unimportant heads: too little for this walk.
    if (aggregate == Aggregate::kMean) scene.policy.threshold = 0.9;
    const int64_t growth[] = {0, 1, 1, 1, 1, 40, 1, 1, 70, 1, 1};
    const KvCounters counted = walk(scene, growth, 0.4f);
    EXPECT_GT(counted.hits, 0);
    EXPECT_GT(counted.misses, 16);
    EXPECT_GT(counted.aged, 0);
    if (HasFatalFailure()) return;
    scene.policy.threshold = -1;
    scene.policy.max_label_age = 0;
    EXPECT_EQ(walk(scene, growth).misses, 16);  // the first sets
  }
}

// Set sizes that a dial has turned, each from its context on; what follows is decided by them too.
TEST_F(RefreshTest, SetSizesFollowTheDial) {
  Scene scene;
  scene.context = 1500;
  scene.kv_heads = 3;
  scene.resident_of = 3;
  scene.policy.threshold = 0.93;
  scene.policy.quality = 0.9;
  World world(scene);
  world.rules().has_dial = true;
  const auto steps = {std::pair{0, 1.0}, {3, 1.3}, {6, 1.7}, {9, 0.4}, {12, 1.1}, {15, 2.0}};
  int64_t refreshed = 0;
  for (const auto& [step, scale] : steps) {
    const int64_t from = scene.context + step;
    SetScale(&scales)[2] = world.rules().set_scales;
    scales[setting_to_replace(scales)] = {from, scale};
    world.rules().largest_scale = std::max(world.rules().largest_scale, scale);
    // One context before the new size, which the older one is still for, and two after.
    for (int64_t context = from - (step > 0); context < from + 2; ++context) {
      PolicyOptions& policy = world.cpu_policy();
      policy.set_tokens = 0;
      const double now_scale =
          context < from ? scales[scales[0].from_context == from].scale : scale;
      policy.set_tokens = scaled_set_size(set_size(policy, context), now_scale);
      const std::vector<float> queries = world.next_queries(0.3f);
      refreshed += world.cpu_refresh(queries, context, World::How::kDecide);
      now(world, queries, context, 3);
      world.expect_equal("scale " + std::to_string(now_scale) + " context " +
                         std::to_string(context));
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(refreshed, 3 * 3);
  EXPECT_LT(refreshed, 3 * 17);
}

TEST_F(RefreshTest, KeySpreadEqualsTheCpu) {
  for (const int32_t head_dim : {64, 128}) {
    for (const DType type : kElementTypes) {
      for (const int64_t context : {int64_t{1}, int64_t{200}, int64_t{1000}}) {
        Scene scene;
        scene.head_dim = head_dim;
        scene.type = type;
        scene.context = context;
        scene.kv_heads = 3;
        scene.resident_of = 3;
        scene.policy.set_tokens = 300;
        World world(scene);
        world.set_num_tokens(context);
        KeySpread params;
        params.tables = world.tables();
        params.rules = world.head_rules().data();
        params.context_tokens = context;
        key_spread(params, nullptr);
        CLO_CUDA(cudaDeviceSynchronize());
        std::vector<int32_t> tokens;
        const int64_t count = std::min<int64_t>(context, kSpreadTokens);
        for (int64_t i = 0; i < count; ++i) {
          tokens.push_back(static_cast<int32_t>(i * context / count));
        }
        const std::vector<HeadRule> rules = world.head_rules().download();
        const std::vector<float> query(static_cast<size_t>(world.group_width()), 1.0f);
        for (int32_t h = 0; h < scene.kv_heads; ++h) {
          const HeadTask task = world.make_task(0, h, query.data(), context);
          float spread = 0;
          world.cpu().key_spread({world.shape(), &task, 1, tokens.data(), count, &spread});
          ASSERT_NEAR(rules[static_cast<size_t>(kLayer * scene.kv_heads + h)].drift_scale,
                      kScale * spread, 1e-5 * kScale)
              << "head " << h << " context " << context;
        }
      }
    }
  }
}

TEST_F(RefreshTest, SetsThatCoverTheContextStayComplete) {
  Scene scene;
  scene.context = 200;
  scene.policy.threshold = -1;
  scene.policy.max_label_age = 8;
  const int64_t growth[] = {0, 1, 8, 9, 60, 13, 14, 40, 60};
  EXPECT_GT(walk(scene, growth).incomplete, 0);
}

TEST_F(RefreshTest, QueriesThatAreNoNumbersMiss) {
  Scene scene;
  scene.policy.threshold = -1;
  World world(scene);
  std::vector<float> queries = world.next_queries(0);
  for (int64_t step = 0; step < 4; ++step) {
    // Both of a rotation's pair: it would spread from one to the other on one side only. The NaN
    // that the device's arithmetic makes: labels are compared byte by byte.
    if (step == 1) queries[3] = queries[3 + 64] = std::bit_cast<float>(0x7FFFFFFFu);
    if (step == 2) std::fill(queries.begin(), queries.begin() + scene.head_dim, 0.0f);
    world.cpu_refresh(queries, scene.context + step, World::How::kDecide);
    now(world, queries, scene.context + step, 4);
    world.expect_equal("step " + std::to_string(step));
  }
}

// The next step's sets from this step's queries, refuted by the true ones where they moved too far.
// In every other step the job for the next one is still under way when its true query asks.
TEST_F(RefreshTest, StepsAheadAndTheirCorrections) {
  cudaStream_t layers = nullptr, beside = nullptr;
  CLO_CUDA(cudaStreamCreateWithFlags(&layers, cudaStreamNonBlocking));
  CLO_CUDA(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  for (const Correction correction : {Correction::kNone, Correction::kTrueQuery}) {
    for (const int32_t head_dim : {64, 128}) {
      Scene scene;
      scene.head_dim = head_dim;
      scene.context = 1500;
      scene.group = head_dim == 64 ? 7 : 4;
      scene.kv_heads = 6;
      scene.num_slots = 2;
      scene.resident_of = 3;
      scene.policy.predict = Predict::kPreviousStep;
      scene.policy.correction = correction;
      scene.policy.threshold = 0.9;
      World world(scene);
      const bool corrects = correction == Correction::kTrueQuery;
      int64_t context = scene.context, due = 0;
      for (int step = 0; step < 8; ++step, ++context) {
        const std::vector<float> queries = world.next_queries(step % 3 == 1 ? 0.5f : 0.35f);
        if (step == 0) world.cpu_refresh(queries, context, World::How::kDecide);
        if (step > 0 && corrects) world.cpu_refresh(queries, context, World::How::kCorrect);
        world.decode(queries, context, layers);
        world.drain(3, beside);
        CLO_CUDA(cudaDeviceSynchronize());
        world.drain(16);
        CLO_CUDA(cudaDeviceSynchronize());
        world.cpu_refresh(queries, context + 1, World::How::kForesee);
        due += world.queue_due(context + 1);
        if (step % 2 == 0) continue;  // not drained, so not compared
        world.drain(4);
        CLO_CUDA(cudaDeviceSynchronize());
        world.expect_equal("step " + std::to_string(step));
        if (HasFatalFailure()) return;
      }
      EXPECT_GT(due, 0);
      KvCounters total = world.cpu_counters(0);
      total += world.cpu_counters(1);
      EXPECT_GT(total.hits, 0);
      EXPECT_EQ(total.corrections > 0, corrects);
    }
  }
  CLO_CUDA(cudaStreamDestroy(layers));
  CLO_CUDA(cudaStreamDestroy(beside));
}

// Nothing is done for predicted sets that are not corrected, empty rows and idle slots.
TEST_F(RefreshTest, RowsThatTakeNoPart) {
  Scene scene;
  scene.policy = always();
  scene.policy.predict = Predict::kPreviousStep;
  World world(scene);
  now(world, world.next_queries(0), scene.context, 2);  // the first sets: nothing foresaw them
  ASSERT_EQ(world.queue().rings[kUrgent].tail, 2u);
  now(world, world.next_queries(1), scene.context + 1, 2);
  EXPECT_EQ(world.queue().rings[kUrgent].tail, 2u);
  EXPECT_EQ(world.queue_due(scene.context + 2), 2);

  scene.policy.predict = Predict::kNone;
  World idle(scene);
  idle.set_active(0);
  idle.decode(idle.next_queries(0), scene.context);
  idle.set_active(1);
  idle.set_row_slot(-1);
  idle.decode(idle.next_queries(0), scene.context);
  CLO_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(idle.queue().rings[kUrgent].tail, 0u);
}

// A step launched ahead of the end neither decides nor leaves anything due.
TEST_F(RefreshTest, NothingIsDecidedPastTheEnd) {
  Scene scene;
  scene.policy = always();
  scene.policy.predict = Predict::kPreviousStep;
  World world(scene);
  now(world, world.next_queries(0), scene.context, 2);
  world.set_capacity(scene.context);
  now(world, world.next_queries(1), scene.context + 1, 2);
  EXPECT_EQ(world.queue().rings[kUrgent].tail, 2u);
  EXPECT_EQ(world.queue_due(scene.context + 2), 0);
}

TEST_F(RefreshTest, JobsOfDecisionsMadeAhead) {
  Scene scene;
  scene.context = 1200;
  scene.kv_heads = 8;
  scene.num_slots = 3;
  scene.resident_of = 4;
  scene.policy.predict = Predict::kPreviousLayer;
  World world(scene);
  int64_t context = scene.context, jobs = 0;
  for (int step = 0; step < 6; ++step, ++context) {
    const std::vector<float> queries = world.next_queries(0.3f);
    jobs += world.cpu_refresh(queries, context, World::How::kForesee);
    world.set_num_tokens(context - 1);
    {
      const DeviceArray<float> on_device(queries);
      decide_ahead({world.tables(), on_device.data(), kLayer, scene.num_slots}, nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
    }
    ASSERT_EQ(world.queue().rings[kAhead].tail, static_cast<uint64_t>(jobs));
    world.drain(4);
    CLO_CUDA(cudaDeviceSynchronize());
    ASSERT_EQ(world.queue().rings[kAhead].head, static_cast<uint64_t>(jobs));
    for (const uint32_t pending : world.pending()) ASSERT_EQ(pending, 0u);
    world.expect_equal("step " + std::to_string(step));
    if (HasFatalFailure()) return;
  }
}

// Told to leave, the clusters leave what is queued; until then they wait for jobs that come later.
TEST_F(RefreshTest, ClustersLeaveWhenTheyAreTold) {
  Scene scene;
  scene.policy = always();
  scene.policy.predict = Predict::kPreviousLayer;
  World world(scene);
  const std::vector<float> queries = world.next_queries(0);
  const DeviceArray<float> on_device(queries);
  world.set_num_tokens(scene.context - 1);
  decide_ahead({world.tables(), on_device.data(), kLayer, 1}, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  RefreshQueue queue = world.queue();
  ASSERT_EQ(queue.rings[kAhead].tail, 2u);
  queue.leave = 1;
  world.set_queue(queue);
  RefreshQueueParams params;
  params.tables = world.tables();
  params.num_clusters = 3;
  params.scratch = world.scratch(params.num_clusters);
  refresh_queue(params, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(world.queue().rings[kAhead].head, 0u);

  cudaStream_t layers = nullptr, beside = nullptr;
  CLO_CUDA(cudaStreamCreateWithFlags(&layers, cudaStreamNonBlocking));
  CLO_CUDA(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  std::vector<float> next = queries;
  for (float& value : next) value = -value;
  const DeviceArray<float> next_on_device(next);
  uint32_t* leave = &world.tables().queue->leave;
  CLO_CUDA(cudaMemsetAsync(leave, 0, sizeof(uint32_t), beside));
  refresh_queue(params, beside);
  world.cpu_refresh(queries, scene.context, World::How::kForesee);
  world.set_num_tokens(scene.context);
  // The first set's jobs are done by the time that the second ones' are queued.
  const auto pending = [&] {
    const auto words = world.pending();
    return std::any_of(words.begin(), words.end(), [](uint32_t word) { return word != 0; });
  };
  for (int naps = 0; pending() && naps < 2000; ++naps) usleep(1000);
  ASSERT_FALSE(pending());
  decide_ahead({world.tables(), next_on_device.data(), kLayer, 1}, layers);
  world.cpu_refresh(next, scene.context + 1, World::How::kForesee);
  CLO_CUDA(cudaStreamSynchronize(layers));
  for (int naps = 0; pending() && naps < 2000; ++naps) usleep(1000);
  EXPECT_EQ(cudaStreamQuery(beside), cudaErrorNotReady);
  CLO_CUDA(cudaMemsetAsync(leave, 0xFF, sizeof(uint32_t), layers));
  CLO_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(world.queue().rings[kAhead].head, 4u);
  world.expect_equal("served");
  CLO_CUDA(cudaStreamDestroy(layers));
  CLO_CUDA(cudaStreamDestroy(beside));
}

// Jobs of a sequence that has ended are dropped.
TEST_F(RefreshTest, JobsOfIdleSlotsAreDropped) {
  Scene scene;
  scene.policy = always();
  scene.policy.predict = Predict::kPreviousLayer;
  World world(scene);
  const DeviceArray<float> on_device(world.next_queries(0));
  world.set_num_tokens(scene.context - 1);
  decide_ahead({world.tables(), on_device.data(), kLayer, 1}, nullptr);
  world.set_num_tokens(scene.context - 1, 0);
  world.drain(1);
  CLO_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(world.queue().rings[kAhead].head, 2u);
  for (const uint32_t pending : world.pending()) EXPECT_EQ(pending, 0u);
  EXPECT_EQ(world.device_head(0).state.has_label, 0);
}

TEST_F(RefreshTest, PrimedSets) {
  for (const Select select : {Select::kHash, Select::kGradedHash, Select::kExact}) {
    Scene scene;
    scene.context = 2100;
    scene.kv_heads = 3;
    scene.resident_of = 2;
    scene.policy = always();
    scene.policy.select = select;
    World world(scene);
    const std::vector<float> queries = world.next_queries(0);
    const DeviceArray<float> on_device(queries);
    const DeviceArray<std::byte> layer_rows(world.layer_rows());
    world.set_num_tokens(scene.context);
    PrimeSets params;
    params.tables = world.tables();
    params.scratch = world.scratch(scene.kv_heads);
    params.queries = on_device.data();
    params.layer_rows = layer_rows.data();
    params.layer_capacity = world.capacity();
    params.context_tokens = scene.context;
    params.layer = kLayer;
    prime_sets(params, nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
    world.cpu_refresh(queries, scene.context, World::How::kPrime);
    world.expect_equal("primed");
  }
}

// Measurement: sets are drawn, but the cache must stay a cache.
TEST_F(RefreshTest, DrawnSetsReplaceTheGivenShare) {
  for (const float share : {0.0f, 0.1f, 0.35f, 0.9f}) {
    Scene scene;
    scene.context = 20000;
    scene.kv_heads = 1;
    scene.policy = always();
    World world(scene);
    world.rules().forced_new_share = share;
    world.rules().forced_hit_rate = 0;
    World::DeviceHead before;
    for (int64_t step = 0; step < 3; ++step) {
      now(world, world.next_queries(0.5f), scene.context + step, 1);
      const World::DeviceHead head = world.device_head(0);
      const int64_t k = set_size(scene.policy, scene.context + step);
      ASSERT_EQ(head.state.num_set_tokens, k);
      ASSERT_EQ(head.state.num_slots_used, k);
      int64_t fresh = 0, bits = 0;
      for (const uint64_t word : head.held) bits += __builtin_popcountll(word);
      ASSERT_EQ(bits, k);
      for (int64_t slot = 0; slot < k; ++slot) {
        const int32_t token = head.map[static_cast<size_t>(slot)];
        ASSERT_GE(token, scene.policy.sink);
        ASSERT_LT(token, scene.context + step - scene.policy.recent);
        ASSERT_TRUE(head.held[static_cast<size_t>(token) / 64] >> (token % 64) & 1u);
        ASSERT_EQ(std::memcmp(head.slots.data() + slot * world.shape().row_bytes(),
                              world.host_row(0, 0, token),
                              static_cast<size_t>(world.shape().row_bytes())),
                  0);
        if (step > 0) fresh += !(before.held[static_cast<size_t>(token) / 64] >> (token % 64) & 1u);
      }
      if (step > 0) {
        EXPECT_NEAR(static_cast<double>(fresh) / static_cast<double>(k), share, 0.04);
      }
      before = head;
    }
  }
}

TEST(RefreshPlan, ScratchHoldsThreeWordsForEveryTokenOfWholePages) {
  EXPECT_EQ(refresh_scratch_bytes(0), 256 * 12);
  EXPECT_EQ(refresh_scratch_bytes(256), 256 * 12);
  EXPECT_EQ(refresh_scratch_bytes(257), 512 * 12);
}

}  // namespace
}  // namespace clo::kernels
