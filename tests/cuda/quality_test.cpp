// --quality on the GPU: samples say what the CPU backend measures, the dial turns as it does there,
// and answers do not depend on the batch.
#include <gtest/gtest.h>

#include "engine/loaded_engine.h"
#include "kernels/gpu_test.h"

namespace clo {
namespace {

class GpuQuality : public kernels::GpuTest {
 protected:
  static constexpr int64_t kPrompt = 3000, kNew = 400;

  static std::unique_ptr<Engine> load(Backend backend, KvType kv_type = KvType::kAuto) {
    EngineOptions options;
    options.kv_type = kv_type;
    options.model_dir = CLO_SOURCE_DIR "/models/recall-7m";
    options.backend = backend;
    options.dtype = WeightType::kBF16;
    options.max_context_tokens = 4096;
    options.max_batch = 4;
    options.keep_prefixes = false;
    return load_engine(options);
  }
  static PolicyOptions with_quality(double quality) {
    PolicyOptions policy = evictable("default");
    policy.set_tokens = 192;
    policy.quality = quality;
    policy.predict = Predict::kPreviousStep;
    policy.correction = Correction::kTrueQuery;
    return policy;
  }
  static Report report_of(Engine& engine, const PolicyOptions& policy, bool measured) {
    Request request = ids_request(random_ids(kPrompt, engine.vocab_size(), 7), kNew, policy);
    request.forced_tokens = random_ids(kNew, engine.vocab_size(), 8);
    request.measure_mass = measured;
    return answer_of(engine, std::move(request)).report;
  }
};

TEST_F(GpuQuality, SamplesSayWhatTheCpuMeasures) {
  const auto cpu = load(Backend::kCpu), gpu = load(Backend::kCuda);
  ASSERT_TRUE(cpu && gpu);
  for (const Predict predict : {Predict::kNone, Predict::kPreviousLayer, Predict::kPreviousStep}) {
    for (const auto persistent :
         {PolicyOptions::Persistent::kPerLayer, PolicyOptions::Persistent::kAll}) {
      for (const double quality : {0.6, 0.9}) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(predict) << " quality " << quality);
        PolicyOptions policy = with_quality(quality);
        policy.predict = predict;
        if (predict == Predict::kNone) policy.correction = Correction::kNone;
        policy.persistent = persistent;
        const Report a = report_of(*cpu, policy, true), b = report_of(*gpu, policy, false);
        const Report c = report_of(*gpu, policy, true);
        ASSERT_TRUE(a.quality && b.quality && c.quality);
        std::printf(
            "quality %.1f: kept %.4f on the CPU, estimated %.4f there, %.4f on the GPU, "
            "drawn %.4f; scale %.3f and %.3f, angle %.3f and %.3f, %ld and %ld samples\n",
            quality, a.total.mean_mass_kept(), a.quality->estimated, b.quality->estimated,
            c.total.mean_mass_kept(), a.quality->set_scale, b.quality->set_scale, a.quality->angle,
            b.quality->angle, static_cast<long>(a.quality->samples),
            static_cast<long>(b.quality->samples));
        EXPECT_EQ(b.quality->samples, a.quality->samples);
        EXPECT_GT(b.quality->samples, kNew / 2);
        EXPECT_NEAR(b.quality->estimated, c.total.mean_mass_kept(), 0.015);
        EXPECT_NEAR(a.total.mean_mass_kept(), c.total.mean_mass_kept(), 0.015);
        EXPECT_NEAR(a.quality->set_scale, b.quality->set_scale, 0.25 * a.quality->set_scale);
        EXPECT_EQ(b.total.mass_samples, 0);
        // Looking at every head changes no answer.
        EXPECT_EQ(b.quality->estimated, c.quality->estimated);
        EXPECT_EQ(b.total.rows_attended, c.total.rows_attended);
      }
    }
  }
}

TEST_F(GpuQuality, WatchedRowsAreThoseOfTheCpu) {
  const auto cpu = load(Backend::kCpu), gpu = load(Backend::kCuda);
  ASSERT_TRUE(cpu && gpu);
  const auto watched = [](Engine& engine, const PolicyOptions& policy) {
    Request request = ids_request(random_ids(kPrompt, engine.vocab_size(), 7), kNew, policy);
    request.forced_tokens = random_ids(kNew, engine.vocab_size(), 8);
    request.watched_ranges = {{100, 130}, {2000, 2010}, {2990, 3000}};
    return answer_of(engine, std::move(request)).report;
  };
  for (const auto persistent :
       {PolicyOptions::Persistent::kPerLayer, PolicyOptions::Persistent::kAll}) {
    PolicyOptions policy = with_quality(0.8);
    policy.quality.reset();
    policy.persistent = persistent;
    const Report a = watched(*cpu, policy), b = watched(*gpu, policy);
    EXPECT_EQ(b.total.watched_rows, 50 * b.num_heads * b.decode_steps);
    EXPECT_EQ(b.total.watched_rows, a.total.watched_rows);
    EXPECT_LT(b.total.watched_rows_attended, b.total.watched_rows);
    // Rounded activations may choose other sets here and there.
    EXPECT_NEAR(static_cast<double>(b.total.watched_rows_attended),
                static_cast<double>(a.total.watched_rows_attended),
                0.02 * static_cast<double>(a.total.watched_rows_attended));
    policy.set_tokens = 4096;
    const Report all = watched(*gpu, policy);
    EXPECT_EQ(all.total.watched_rows_attended, all.total.watched_rows);
  }
  EXPECT_EQ(watched(*gpu, *preset("dense")).total.watched_rows, 0);
}

// First sets are chosen by the policy's size, whatever a dial's sizes are rounded to.
TEST_F(GpuQuality, AnySetSizeAndCompressedRows) {
  for (const KvType kv_type : {KvType::kAuto, KvType::kInt8, KvType::kFp8}) {
    const auto cpu = load(Backend::kCpu, kv_type), gpu = load(Backend::kCuda, kv_type);
    ASSERT_TRUE(cpu && gpu);
    PolicyOptions policy = with_quality(0.8);
    policy.set_tokens = 100;
    const Report a = report_of(*cpu, policy, true), b = report_of(*gpu, policy, true);
    ASSERT_TRUE(a.quality && b.quality);
    SCOPED_TRACE(testing::Message() << "rows " << static_cast<int>(kv_type));
    EXPECT_EQ(b.quality->samples, a.quality->samples);
    EXPECT_EQ(b.total.rows_primed, a.total.rows_primed);
    EXPECT_NEAR(b.quality->estimated, a.quality->estimated, 0.015);
    EXPECT_NEAR(b.total.mean_mass_kept(), a.total.mean_mass_kept(), 0.015);
  }
}

TEST_F(GpuQuality, TheBatchDoesNotMatter) {
  const auto engine = load(Backend::kCuda);
  ASSERT_NE(engine, nullptr);
  const auto request = [&](uint64_t seed, int64_t length) {
    return ids_request(random_ids(length, engine->vocab_size(), seed), 200, with_quality(0.8));
  };
  const Response alone = answer_of(*engine, request(21, 900));
  ASSERT_TRUE(alone.report.quality);
  EXPECT_NE(alone.report.quality->set_scale, 1);
  const Response again = answer_of(*engine, request(21, 900));
  EXPECT_EQ(again.tokens, alone.tokens);
  EXPECT_EQ(again.report.quality->estimated, alone.report.quality->estimated);
  std::vector<RequestId> ids;
  for (const uint64_t seed : {20, 21, 22}) {
    ids.push_back(*engine->submit(request(seed, seed == 21 ? 900 : 500)));
  }
  Request shown = request(23, 300);  // its logits are shown: steps are not launched ahead
  shown.on_logits = [](std::span<const float>) {};
  shown.max_new_tokens = 40;
  ids.push_back(*engine->submit(std::move(shown)));
  while (engine->step()) {
  }
  const auto beside = engine->take(ids[1]);
  ASSERT_TRUE(beside);
  EXPECT_EQ(beside->tokens, alone.tokens);
  // Attention is cut by what the whole batch reads, so that sums round otherwise.
  EXPECT_NEAR(beside->report.quality->estimated, alone.report.quality->estimated, 2e-3);
  EXPECT_NEAR(beside->report.quality->set_scale, alone.report.quality->set_scale, 0.02);
  EXPECT_NEAR(beside->report.quality->angle, alone.report.quality->angle, 0.02);
  EXPECT_EQ(engine->memory().pages_in_use, 0);
}

TEST_F(GpuQuality, CancelFreesEverything) {
  const auto engine = load(Backend::kCuda);
  ASSERT_NE(engine, nullptr);
  const int64_t used = engine->memory().device_used_bytes;
  // Contexts from 700 on: looks at 704, 712 and so on; a dial that has turned waits for two steps.
  for (const int64_t stop : {0, 1, 4, 5, 6, 7, 33, 34, 35, 36, 37, 38}) {
    int64_t steps = 0;
    const auto id = engine->submit(
        ids_request(random_ids(700, engine->vocab_size(), 3), 300, with_quality(0.9)));
    ASSERT_TRUE(id);
    while (engine->step() && steps++ < stop) {
    }
    engine->cancel(*id);
    while (engine->step()) {
    }
    ASSERT_TRUE(engine->take(*id));
    EXPECT_EQ(engine->memory().device_used_bytes, used);
    EXPECT_EQ(engine->memory().pages_in_use, 0);
  }
}

}  // namespace
}  // namespace clo
