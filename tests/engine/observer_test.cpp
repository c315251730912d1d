// What an observer of attention sees: the same queries and keys wherever rows live, whether tokens
// are fed one by one or read as a prompt, and the queries that the engine itself compares.
#include <cmath>

#include "engine/loaded_engine.h"
#include "profile/head_statistics.h"
#include "profile/trace.h"

namespace clo {
namespace {

constexpr int64_t kPrompt = 300, kForced = 41, kSteps = kForced - 1;

class Observer : public testing::Test {
 protected:
  TraceRecorder recorder_{TraceRecorder::Source::kDecode};
  Report report_;

  WindowTrace record(const PolicyOptions& policy, KvType type) {
    EngineOptions options = tiny_options("recall-7m");
    options.backend = Backend::kCpu;
    options.kv_type = type;
    options.observer = &recorder_;
    options.guard_host_rows = false;
    options.max_context_tokens = 512;
    options.policy = policy;
    const std::unique_ptr<Engine> engine = load_engine(options);
    const auto ids = random_ids(kPrompt + kForced, engine->vocab_size(), 3);
    const auto middle = ids.begin() + kPrompt;
    Request request = ids_request({ids.begin(), middle}, kForced, policy);
    request.forced_tokens.assign(middle, ids.end());
    request.measure_mass = true;
    recorder_.begin(kPrompt + kSteps, kSteps);
    report_ = answer_of(*engine, std::move(request)).report;
    return recorder_.take();
  }
  // All tokens as a prompt.
  WindowTrace record_prompt(KvType type, int32_t chunk, int64_t steps = kSteps, int64_t runs = 1) {
    TraceRecorder recorder;
    EngineOptions options = tiny_options("recall-7m");
    options.backend = Backend::kCpu;
    options.kv_type = type;
    options.observer = &recorder;
    options.max_context_tokens = 512;
    options.prefill_chunk = chunk;
    options.policy = *preset("dense");
    const std::unique_ptr<Engine> engine = load_engine(options);
    const auto ids = random_ids(kPrompt + kForced, engine->vocab_size(), 3);
    Request request = ids_request({ids.begin(), ids.end() - 1}, 1, options.policy);
    recorder.begin(kPrompt + kSteps, steps, runs);
    (void)answer_of(*engine, std::move(request));
    return recorder.take();
  }
  static PolicyOptions everything_offloaded() {
    PolicyOptions policy = evictable("default");
    policy.select = Select::kExact;
    policy.kv_ratio = 1;
    return policy;
  }
};

TEST_F(Observer, SeesTheSameOfResidentAndOfOffloadedHeads) {
  for (const KvType type : {KvType::kBF16, KvType::kInt8}) {
    const WindowTrace dense = record(*preset("dense"), type);
    const WindowTrace offloaded = record(everything_offloaded(), type);
    for (const int32_t layer : {0, 7}) {
      const HeadWindow a = dense.head(layer, 1, 0), b = offloaded.head(layer, 1, 0);
      ASSERT_EQ(a.num_steps, kSteps);
      ASSERT_EQ(a.context_of(kSteps - 1), kPrompt + kSteps);
      // Layer 0's come from the embedding alone; later ones pass through attention's sums.
      const float tolerance = layer == 0 ? 0.0f : 0.1f;
      ASSERT_EQ(a.keys.size(), b.keys.size());
      for (size_t i = 0; i < a.keys.size(); ++i) ASSERT_NEAR(a.keys[i], b.keys[i], tolerance) << i;
      for (size_t i = 0; i < a.queries.size(); ++i) {
        ASSERT_NEAR(a.queries[i], b.queries[i], tolerance) << i;
      }
    }
  }
}

double apart(std::span<const float> a, std::span<const float> b) {
  double difference = 0, square = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (a[i] - b[i]);
    square += double{a[i]} * a[i];
  }
  return std::sqrt(difference / square);
}

TEST_F(Observer, SeesInAPromptWhatDecodeStepsWouldHave) {
  const PolicyOptions policy = *preset("default");
  for (const KvType type : {KvType::kF32, KvType::kBF16}) {
    const WindowTrace steps = record(*preset("dense"), type);
    for (const int32_t chunk : {512, 48}) {  // whole, and so that a chunk begins among the steps
      const WindowTrace prompt = record_prompt(type, chunk);
      for (int32_t layer = 0; layer < 8; ++layer) {
        SCOPED_TRACE(testing::Message() << layer << " in chunks of " << chunk);
        const HeadWindow a = steps.head(layer, 1, 0), b = prompt.head(layer, 1, 0);
        ASSERT_EQ(a.num_steps, b.num_steps);
        ASSERT_EQ(a.first_context, b.first_context);
        ASSERT_EQ(a.keys.size(), b.keys.size());
        ASSERT_EQ(a.queries.size(), b.queries.size());
        // Layer 0's pass through no attention; with rows of 16 bits the sums of two ways round
        // apart, and every layer adds to it.
        const double bound = layer == 0 ? 1e-6 : type == KvType::kF32 ? 1e-4 : 0.02;
        EXPECT_LT(apart(a.keys, b.keys), bound);
        EXPECT_LT(apart(a.queries, b.queries), bound);
        const HeadShape head{2, 64};
        const HeadAttention of_a = measure_attention(head, a, policy, 0.125f);
        const HeadAttention of_b = measure_attention(head, b, policy, 0.125f);
        int64_t both = 0, all = 0;
        for (int64_t step = 0; step < kSteps; ++step) {
          both += tokens_in_both(of_a.set(step), of_b.set(step));
          all += of_a.sizes[step];
        }
        EXPECT_GT(static_cast<double>(both), (type == KvType::kF32 ? 0.999 : 0.97) * all);
        EXPECT_LT(apart(of_a.outside, of_b.outside), 0.02);
      }
    }
  }
}

TEST_F(Observer, SeesInRunsWhatTheWholeWindowHas) {
  const WindowTrace whole = record_prompt(KvType::kBF16, 512, kPrompt + kSteps);
  for (const int32_t chunk : {512, 48}) {
    const WindowTrace runs = record_prompt(KvType::kBF16, chunk, 37, 4);  // 340 tokens
    for (int32_t layer = 0; layer < 8; ++layer) {
      for (int64_t run = 0; run < 4; ++run) {
        SCOPED_TRACE(testing::Message() << layer << " in chunks of " << chunk << ", run " << run);
        const HeadWindow all = whole.head(layer, 1, 0), part = runs.head(layer, 1, run);
        const int64_t end = 340 - (3 - run) * 170 / 4;
        ASSERT_EQ(part.context_of(36), end);
        ASSERT_EQ(part.num_tokens, end);
        const double bound = layer == 0 ? 1e-6 : chunk == 512 ? 1e-6 : 0.02;
        EXPECT_LT(apart(all.keys.first(part.keys.size()), part.keys), bound);
        for (int64_t g = 0; g < 2; ++g) {
          const auto of_all = all.queries.subspan((g * 340 + end - 37) * 64, 37 * 64);
          EXPECT_LT(apart(of_all, part.queries.subspan(g * 37 * 64, 37 * 64)), bound);
        }
      }
    }
  }
}

TEST_F(Observer, SeesTheQueriesWhoseCosinesTheReportHas) {
  const WindowTrace trace = record(*preset("dense"), KvType::kAuto);
  for (int32_t layer = 0; layer < 8; ++layer) {
    double sum = 0;  // of steps 1 and on; the report has the step from the prompt's end as well
    for (int32_t head = 0; head < 2; ++head) {
      const HeadWindow window = trace.head(layer, head, 0);
      for (int32_t g = 0; g < 2; ++g) {
        sum += query_cosines({2, 64}, {&window, 1}, g, {})[0][0] * (kSteps - 1);
      }
    }
    const KvCounters& counters = report_.layers[layer];
    ASSERT_EQ(counters.query_cosine_samples, 4 * kSteps);
    EXPECT_NEAR(sum, counters.query_cosine, 4.001) << layer;
  }
}

}  // namespace
}  // namespace clo
