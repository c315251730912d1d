// --quality and --hit-test through whole requests: samples say what is measured, the dial follows
// them, and neither the batch nor the place of a head's rows matters.
#include <cmath>

#include "loaded_engine.h"

namespace clo {
namespace {

constexpr int64_t kPrompt = 1500, kNew = 400;

PolicyOptions with_quality(double quality) {
  PolicyOptions policy = evictable("default");
  policy.set_tokens = 192;
  policy.quality = quality;
  return policy;
}

Request forced_request(const Engine& engine, const PolicyOptions& policy) {
  Request request = ids_request(random_ids(kPrompt, engine.vocab_size(), 7), kNew, policy);
  request.forced_tokens = random_ids(kNew, engine.vocab_size(), 8);
  request.measure_mass = true;
  return request;
}

TEST(Quality, SamplesSayWhatIsMeasured) {
  EngineOptions options = tiny_options("llama31");
  options.keep_prefixes = false;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  for (const auto persistent :
       {PolicyOptions::Persistent::kPerLayer, PolicyOptions::Persistent::kAll}) {
    for (const double quality : {0.4, 0.7}) {
      PolicyOptions policy = with_quality(quality);
      policy.persistent = persistent;
      const Report report = answer_of(*engine, forced_request(*engine, policy)).report;
      ASSERT_TRUE(report.quality);
      EXPECT_EQ(report.quality->wanted, quality);
      EXPECT_GE(report.quality->samples, kNew / 2);
      EXPECT_NEAR(report.quality->estimated, report.total.mean_mass_kept(), 0.01);
      EXPECT_LE(report.quality->low, report.quality->estimated);
      EXPECT_GE(report.quality->high, report.quality->estimated);
    }
  }
}

TEST(Quality, MoreIsKeptWhereMoreIsWanted) {
  EngineOptions options = tiny_options("llama31");
  options.keep_prefixes = false;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  double last_mass = 0, last_read = 0;
  for (const double quality : {0.2, 0.35, 0.5}) {
    const Report report = answer_of(*engine, forced_request(*engine, with_quality(quality))).report;
    EXPECT_GT(report.total.mean_mass_kept(), last_mass) << quality;
    EXPECT_GT(report.share_attended, last_read) << quality;
    last_mass = report.total.mean_mass_kept();
    last_read = report.share_attended;
  }
}

TEST(Quality, TheBatchDoesNotMatter) {
  EngineOptions options = tiny_options("qwen3");
  options.keep_prefixes = false;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  const auto request = [&](uint64_t seed) {
    return ids_request(random_ids(900, engine->vocab_size(), seed), 100, with_quality(0.6));
  };
  const Response alone = answer_of(*engine, request(21));
  std::vector<RequestId> ids;
  for (const uint64_t seed : {20, 21, 22}) ids.push_back(*engine->submit(request(seed)));
  while (engine->step()) {
  }
  const auto beside = engine->take(ids[1]);
  ASSERT_TRUE(beside);
  EXPECT_EQ(beside->tokens, alone.tokens);
  EXPECT_EQ(beside->report.quality->estimated, alone.report.quality->estimated);
  EXPECT_EQ(beside->report.quality->set_scale, alone.report.quality->set_scale);
  EXPECT_EQ(engine->memory().pages_in_use, 0);
}

TEST(Quality, IsRefusedWhereItSaysNothing) {
  const auto engine = load_engine(tiny_options("llama31"));
  ASSERT_NE(engine, nullptr);
  PolicyOptions policy = *preset("dense");
  policy.quality = 0.9;
  const auto refused = engine->submit(ids_request({1, 2, 3}, 1, policy));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadFlag);
  for (const double quality : {0.0, 1.0, -1.0, 1.5, std::nan("")}) {
    EXPECT_FALSE(engine->submit(ids_request({1, 2, 3}, 1, with_quality(quality)))) << quality;
  }
}

// A limit that nothing passes refuses every hit, one that all pass refuses none.
TEST(HitTests, RefuseByTheirLimit) {
  EngineOptions options = tiny_options("llama31");
  options.keep_prefixes = false;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  PolicyOptions policy = evictable("default");
  policy.set_tokens = 192;
  policy.threshold = -1;  // the cosine refuses nothing
  policy.max_label_age = 0;
  const auto hits = [&] {
    const Report report = answer_of(*engine, forced_request(*engine, policy)).report;
    return report.total.hits;
  };
  const int64_t all = hits();
  EXPECT_GT(all, 0);
  for (const HitTest test : {HitTest::kDrift, HitTest::kEntropy}) {
    policy.hit_test = test;
    policy.drift_limit = policy.entropy_rise = 1e9;
    EXPECT_EQ(hits(), all);
    policy.drift_limit = 1e-9;
    policy.entropy_rise = 1e-9;
    const int64_t few = hits();
    if (test == HitTest::kDrift) {
      EXPECT_EQ(few, 0);
    } else {
      EXPECT_LT(few, all);  // attention that became sharper is no reason
      EXPECT_GT(few, 0);
    }
  }
}

// Heads change places at the prompt's end, and no answer changes.
TEST(Start, WhereHeadsLieDoesNotMatter) {
  for (const KvType kv_type : {KvType::kAuto, KvType::kInt8}) {
    EngineOptions options = tiny_options("llama31");
    options.keep_prefixes = false;
    options.kv_type = kv_type;
    PolicyOptions policy = *preset("default");
    policy.threshold = 0.3;  // some heads hit, some do not
    policy.set_tokens = 300;
    const auto prompt = [&](const Engine& engine) {
      return random_ids(kPrompt, engine.vocab_size(), 7);
    };
    std::vector<int32_t> evicted;
    {
      const auto engine = load_engine(options);
      ASSERT_NE(engine, nullptr);
      const int64_t idle = engine->memory().device_used_bytes;
      PolicyOptions none = policy;
      none.persistent = PolicyOptions::Persistent::kPerLayer;
      const Response response = answer_of(*engine, ids_request(prompt(*engine), kNew, none));
      evicted = response.tokens;
      options.device_memory_bytes = idle + response.report.device_kv_bytes * 3;
    }
    int64_t swapped = 0;
    // Fewer and fewer heads fit.
    for (int step = 0; step < 6; ++step) {
      const auto engine = load_engine(options);
      ASSERT_NE(engine, nullptr);
      const Response response = answer_of(*engine, ids_request(prompt(*engine), kNew, policy));
      EXPECT_EQ(response.tokens, evicted);
      EXPECT_LE(response.report.num_swapped_heads, response.report.num_resident_heads);
      swapped += response.report.num_swapped_heads;
      options.device_memory_bytes = options.device_memory_bytes * 19 / 20;
    }
    EXPECT_GT(swapped, 0);
  }
}

}  // namespace
}  // namespace clo
