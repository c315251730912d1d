// Samples of the attention mass against the CPU's, over the same draws.
#include "kernels/mass/mass.h"

#include <gtest/gtest.h>

#include <cmath>

#include "attention/mass_rows.h"
#include "kernels/refresh_world.h"
#include "kernels/sample/sample.h"
#include "ops/mass_draw.h"

namespace clo::kernels {
namespace {

// Kept mass in [0, 1]: sums of a thousand exponentials in f32.
constexpr double kBound = 2e-4;

class MassTest : public GpuTest {
 protected:
  // What the CPU says of a head after its set was chosen, and the log-sum-exp it starts from.
  struct Looked {
    double kept = 0;
    std::vector<float> attended;
    int64_t outside = 0;
    int64_t watched_attended = 0;
  };
  // Every third token of the last half, and what lies at both ends.
  static bool is_watched(int64_t token, int64_t context) {
    return token < 3 || token >= context - 2 || (token >= context / 2 && token % 3 == 1);
  }
  static Looked cpu_look(World& world, int64_t i, const std::vector<float>& queries,
                         int64_t context, int32_t num_rows) {
    const KvShape& shape = world.shape();
    const auto group = static_cast<size_t>(shape.group_size());
    const auto slot = static_cast<int32_t>(i / shape.num_kv_heads);
    const auto kv_head = static_cast<int32_t>(i % shape.num_kv_heads);
    HeadTask task =
        world.make_task(slot, kv_head, queries.data() + i * world.group_width(), context);
    std::vector<float> out(static_cast<size_t>(world.group_width()));
    task.out = out.data();
    Looked looked;
    looked.attended.resize(group);
    int64_t rows_read = 0;
    AttendParams params;
    params.shape = shape;
    params.tasks = &task;
    params.num_tasks = 1;
    params.scale = kScale;
    params.log_sum_exp = looked.attended.data();
    params.rows_read = &rows_read;
    world.cpu().attend(params);
    looked.outside = context - rows_read;
    const HeadCacheView& head = *task.head;
    const int64_t ring_begin = std::max<int64_t>(head.sink_tokens, context - head.ring_tokens);
    for (int64_t t = 0; t < context; ++t) {
      looked.watched_attended +=
          is_watched(t, context) && (t < head.sink_tokens || t >= ring_begin);
    }
    for (int32_t entry = 0; entry < head.state->num_slots_used; ++entry) {
      const int64_t token = head.slot_token[entry];
      looked.watched_attended += token >= 0 && token < ring_begin && is_watched(token, context);
    }
    if (looked.outside == 0) {
      looked.kept = 1;
      return looked;
    }
    std::vector<int32_t> tokens;
    draw_rows(*task.head, nullptr, context, kLayer * shape.num_kv_heads + kv_head, looked.outside,
              num_rows, tokens);
    std::vector<float> drawn(group);
    world.cpu().full_scores(
        {shape, &task, 1, kScale, drawn.data(), tokens.data(), std::ssize(tokens)});
    const double weight = static_cast<double>(looked.outside) / static_cast<double>(tokens.size());
    for (size_t g = 0; g < group; ++g) {
      looked.kept += 1 / (1 + weight * std::exp(double{drawn[g]} - double{looked.attended[g]}));
    }
    looked.kept /= static_cast<double>(group);
    return looked;
  }
};

TEST_F(MassTest, StepsEqualTheCpu) {
  bool drew = false, listed = false;
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t group : {1, 3, 4, 8}) {
      for (const int64_t context : {int64_t{352}, int64_t{1300}, int64_t{3000}}) {
        Scene scene;
        scene.head_dim = head_dim;
        scene.group = group;
        scene.kv_heads = 3;
        scene.num_slots = 2;
        scene.resident_of = 3;
        scene.type = group == 3 ? DType::kF16 : DType::kBF16;
        scene.context = context;
        scene.policy = always();
        scene.policy.set_tokens = 200;
        World world(scene);
        world.rules().looks = MassLooks::kAll;
        const std::vector<float> queries = world.next_queries(1);
        world.cpu_refresh(queries, context, World::How::kDecide);
        world.decode(queries, context);
        world.drain(3);
        world.fill_fixed_rows(context);

        const KvShape& shape = world.shape();
        std::vector<float> attended(
            static_cast<size_t>(kLayers * scene.num_slots * shape.num_q_heads), 0.0f);
        std::vector<Looked> looked;
        for (int64_t i = 0; i < world.num_heads(); ++i) {
          looked.push_back(cpu_look(world, i, queries, context, kMassRows));
          drew = drew || looked.back().outside > kMassRows;
          listed = listed || looked.back().outside <= kMassRows;
          const int64_t slot = i / scene.kv_heads, kv_head = i % scene.kv_heads;
          std::copy(looked.back().attended.begin(), looked.back().attended.end(),
                    attended.begin() + (kLayer * scene.num_slots + slot) * shape.num_q_heads +
                        kv_head * group);
        }
        const DeviceArray<float> on_device(attended);
        const PinnedArray<MassSample> samples(int64_t{kResultRing} * scene.num_slots * kMassLooks);
        StepMass params;
        params.tables = world.tables();
        params.log_sum_exp = on_device.data();
        params.samples = samples.data();
        params.rows = scene.num_slots;
        params.every_head = true;
        // One slot of the two is watched; bits beyond the context do not count.
        std::vector<uint32_t> bits(static_cast<size_t>(context / 32 + 2), 0u);
        int64_t watched = 0;
        for (int64_t t = 0; t < std::ssize(bits) * 32; ++t) {
          if (t < context && !is_watched(t, context)) continue;
          bits[static_cast<size_t>(t / 32)] |= 1u << (t % 32);
          watched += t < context;
        }
        const DeviceArray<uint32_t> watched_bits(bits);
        world.watch(1, watched_bits.data());
        step_mass(params, nullptr);
        CLO_CUDA(cudaDeviceSynchronize());

        const int32_t heads = kLayers * scene.kv_heads;
        for (int32_t s = 0; s < scene.num_slots; ++s) {
          SCOPED_TRACE(testing::Message() << "head_dim " << head_dim << " group " << group
                                          << " context " << context << " slot " << s);
          double sum = 0;
          int64_t watched_attended = 0;
          for (int32_t h = 0; h < scene.kv_heads; ++h) {
            const Looked& of_head = looked[static_cast<size_t>(s * scene.kv_heads + h)];
            sum += of_head.kept;
            watched_attended += of_head.watched_attended;
            EXPECT_GT(of_head.kept, 0.01);
            EXPECT_LT(of_head.kept, 0.99);
            int times = 0;
            for (int32_t j = 0; j < kMassLooks; ++j) {
              const MassSample& sample = samples.data()[s * kMassLooks + j];
              if (sample.head != kLayer * scene.kv_heads + h) continue;
              ++times;
              EXPECT_TRUE(is_looked_at(context, sample.head, heads));
              EXPECT_NEAR(sample.kept, of_head.kept, kBound);
              EXPECT_EQ(sample.fresh, 1);
            }
            // Fewer heads than looks: each has its turn, and further looks at it see nothing.
            EXPECT_EQ(times, looks_at_some(context) ? 1 : 0);
          }
          const DeviceCounters counted = world.device_counters(s);
          EXPECT_EQ(counted.mass_samples, static_cast<uint64_t>(shape.num_q_heads));
          EXPECT_NEAR(counted.mass_kept / group, sum, scene.kv_heads * kBound);
          EXPECT_EQ(counted.watched_rows,
                    s == 1 ? static_cast<uint64_t>(watched * scene.kv_heads) : 0u);
          EXPECT_EQ(counted.watched_rows_attended,
                    s == 1 ? static_cast<uint64_t>(watched_attended) : 0u);
        }
      }
    }
  }
  EXPECT_TRUE(drew && listed);
}

// Each head is looked at once a round, and only those: the others' samples stay empty.
TEST_F(MassTest, StepsTakeTheirTurns) {
  Scene scene;
  scene.context = 113 * kMassPeriod;
  scene.kv_heads = kMassLooks / kLayers;
  scene.policy = always();
  World world(scene);
  world.rules().looks = MassLooks::kSome;
  const std::vector<float> queries = world.next_queries(1);
  world.decode(queries, scene.context);
  world.drain(3);
  const DeviceArray<float> attended(
      std::vector<float>(static_cast<size_t>(kLayers * world.shape().num_q_heads), 5.0f));
  const PinnedArray<MassSample> samples(int64_t{kResultRing} * kMassLooks);
  StepMass params;
  params.tables = world.tables();
  params.log_sum_exp = attended.data();
  params.samples = samples.data();
  params.rows = 1;
  const int32_t heads = kLayers * scene.kv_heads;
  std::vector<int> times(static_cast<size_t>(heads), 0);
  for (int64_t context = scene.context; context < scene.context + 2 * kMassPeriod; ++context) {
    world.set_num_tokens(context - 1);
    step_mass(params, nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
    for (int32_t j = 0; j < kMassLooks; ++j) {
      const int32_t head = samples.data()[j].head;
      ASSERT_EQ(head, looks_at_some(context) ? head_looked_at(context, j, heads) : -1);
      if (head >= 0) ++times[static_cast<size_t>(head)];
    }
  }
  EXPECT_EQ(times, std::vector<int>(static_cast<size_t>(heads), 2));
  EXPECT_EQ(world.device_counters(0).mass_samples, 0u);

  world.set_num_tokens(scene.context - 1, 0);  // an idle slot
  step_mass(params, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  for (int32_t j = 0; j < kMassLooks; ++j) EXPECT_EQ(samples.data()[j].head, -1);
}

// What the true queries found due for the next step is queued when the sets have been looked at.
TEST_F(MassTest, QueuesWhatIsDue) {
  Scene scene;
  scene.context = 1200;
  scene.kv_heads = 6;
  scene.resident_of = 3;
  scene.policy.predict = Predict::kPreviousStep;
  scene.policy.threshold = 0.9;
  World world(scene);
  world.rules().looks = MassLooks::kAll;
  const DeviceArray<float> attended(
      std::vector<float>(static_cast<size_t>(kLayers * world.shape().num_q_heads), 5.0f));
  const PinnedArray<MassSample> samples(int64_t{kResultRing} * kMassLooks);
  StepMass params;
  params.tables = world.tables();
  params.log_sum_exp = attended.data();
  params.samples = samples.data();
  params.rows = 1;
  params.every_head = true;
  int64_t context = scene.context, due = 0;
  for (int step = 0; step < 6; ++step, ++context) {
    const std::vector<float> queries = world.next_queries(step % 3 == 1 ? 0.5f : 0.35f);
    if (step == 0) world.cpu_refresh(queries, context, World::How::kDecide);
    world.decode(queries, context);
    world.drain(3);
    const uint64_t before = world.queue().rings[kAhead].tail;
    const int64_t misses = world.cpu_refresh(queries, context + 1, World::How::kForesee);
    step_mass(params, nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(world.queue().rings[kAhead].tail - before, static_cast<uint64_t>(misses));
    world.drain(4);
    CLO_CUDA(cudaDeviceSynchronize());
    world.expect_equal("step " + std::to_string(step));
    if (HasFatalFailure()) return;
    due += misses;
  }
  EXPECT_GT(due, 0);
}

TEST_F(MassTest, FirstSetsEqualTheCpu) {
  for (const int32_t head_dim : {64, 128}) {
    for (const int64_t context : {int64_t{400}, int64_t{2100}}) {
      Scene scene;
      scene.head_dim = head_dim;
      scene.context = context;
      scene.kv_heads = 4;
      scene.resident_of = 3;
      scene.policy = always();
      scene.policy.set_tokens = 150;
      World world(scene);
      const std::vector<float> queries = world.next_queries(0);
      const DeviceArray<float> on_device(queries);
      const DeviceArray<std::byte> layer_rows(world.layer_rows());
      world.set_num_tokens(context, 0);
      PrimeSets prime;
      prime.tables = world.tables();
      prime.scratch = world.scratch(scene.kv_heads);
      prime.queries = on_device.data();
      prime.layer_rows = layer_rows.data();
      prime.layer_capacity = world.capacity();
      prime.context_tokens = context;
      prime.layer = kLayer;
      prime_sets(prime, nullptr);
      const PinnedArray<MassSample> samples(scene.kv_heads);
      FirstMass params;
      params.tables = world.tables();
      params.queries = on_device.data();
      params.layer_rows = layer_rows.data();
      params.layer_capacity = world.capacity();
      params.context_tokens = context;
      params.samples = samples.data();
      params.layer = kLayer;
      first_mass(params, nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
      world.cpu_refresh(queries, context, World::How::kPrime);
      world.fill_fixed_rows(context);
      for (int32_t h = 0; h < scene.kv_heads; ++h) {
        const Looked looked = cpu_look(world, h, queries, context, kFirstMassRows);
        EXPECT_EQ(samples.data()[h].head, kLayer * scene.kv_heads + h);
        EXPECT_NEAR(samples.data()[h].kept, looked.kept, kBound) << "head " << h;
        EXPECT_LT(looked.kept, 0.99);
      }
    }
  }
}

}  // namespace
}  // namespace clo::kernels
