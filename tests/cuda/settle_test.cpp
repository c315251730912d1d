// Which heads fill the memory that is left, settled at a prompt's end on the GPU as on the CPU.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/loaded_engine.h"
#include "kernels/gpu_test.h"

namespace clo {
namespace {

class GpuSettle : public kernels::GpuTest {
 protected:
  static constexpr int64_t kPrompt = 1500, kNew = 300;

  struct Run {
    std::vector<std::vector<float>> logits;
    Report report;
  };
  // At most so much memory for KV; 0: as much as there is.
  static std::unique_ptr<Engine> load(Backend backend, KvType kv_type, int64_t memory_bytes) {
    EngineOptions options;
    options.model_dir = CLO_SOURCE_DIR "/models/recall-7m";
    options.backend = backend;
    options.dtype = WeightType::kBF16;
    options.kv_type = kv_type;
    options.max_context_tokens = 4096;
    options.keep_prefixes = false;
    options.device_memory_bytes = memory_bytes;
    return load_engine(options);
  }
  static Run run(Engine& engine, const PolicyOptions& policy) {
    Run made;
    Request request = ids_request(random_ids(kPrompt, engine.vocab_size(), 7), kNew, policy);
    request.forced_tokens = random_ids(kNew, engine.vocab_size(), 8);
    request.on_logits = [&](std::span<const float> logits) {
      made.logits.emplace_back(logits.begin(), logits.end());
    };
    made.report = answer_of(engine, std::move(request)).report;
    return made;
  }
  static double worst_cosine(const Run& a, const Run& b) {
    double worst = 0;
    EXPECT_EQ(a.logits.size(), b.logits.size());
    for (size_t i = 0; i < std::min(a.logits.size(), b.logits.size()); ++i) {
      double dot = 0, aa = 0, bb = 0;
      for (size_t d = 0; d < a.logits[i].size(); ++d) {
        dot += double{a.logits[i][d]} * b.logits[i][d];
        aa += double{a.logits[i][d]} * a.logits[i][d];
        bb += double{b.logits[i][d]} * b.logits[i][d];
      }
      worst = std::max(worst, 1 - dot / std::sqrt(aa * bb));
    }
    return worst;
  }
};

// Fewer and fewer heads fit. Where a head lies changes no answer; rows in another order are all
// that differs, which now and then makes another set of a query between two.
TEST_F(GpuSettle, HeadsChangePlacesAndAnswersStay) {
  for (const KvType kv_type : {KvType::kAuto, KvType::kInt8}) {
    SCOPED_TRACE(static_cast<int>(kv_type));
    PolicyOptions policy = *preset("default");
    policy.threshold = 0.6;  // some heads hit, some do not
    policy.set_tokens = 300;
    PolicyOptions none = policy;
    none.persistent = PolicyOptions::Persistent::kPerLayer;
    Run evicted;
    int64_t memory = int64_t{4} << 30, each = 0;
    {
      const auto engine = load(Backend::kCuda, kv_type, memory);
      ASSERT_TRUE(engine);
      evicted = run(*engine, none);
      const int64_t free_bytes =
          engine->memory().device_budget_bytes - engine->memory().device_used_bytes;
      each = evicted.report.device_kv_bytes;
      memory += 3 * each - free_bytes;
    }
    int64_t swapped = 0, primed = 0;
    for (int step = 0; step < 6; ++step) {
      const auto engine = load(Backend::kCuda, kv_type, memory);
      ASSERT_TRUE(engine);
      const int64_t idle = engine->memory().device_used_bytes;
      const Run settled = run(*engine, policy);
      std::printf("%d resident heads, %d changed places, %ld rows primed, worst 1 - cosine %.2e\n",
                  settled.report.num_resident_heads, settled.report.num_swapped_heads,
                  static_cast<long>(settled.report.total.rows_primed),
                  worst_cosine(settled, evicted));
      EXPECT_LE(settled.report.num_swapped_heads, settled.report.num_resident_heads);
      EXPECT_LT(worst_cosine(settled, evicted), 2e-2);
      EXPECT_EQ(engine->memory().device_used_bytes, idle);
      swapped += settled.report.num_swapped_heads;
      primed += settled.report.total.rows_primed;
      memory -= each / 4;
    }
    EXPECT_GT(swapped, 0);
    EXPECT_GT(primed, 0);
  }
}

}  // namespace
}  // namespace clo
