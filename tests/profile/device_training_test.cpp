// Hash training on a device against the CPU's. What needs a device skips, by name, without one.
#include "profile/device_training.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cuda/hash_trainer.h"
#include "device/device_facts.h"
#include "profile/boundary_inputs.h"
#include "profile/measure.h"
#include "profile/structured_windows.h"
#include "select/hash_signs.h"
#include "select/set_rule.h"

namespace clo {
namespace {

// Recorded heads of one layer, with their exact sets.
struct Heads {
  KvShape shape;
  HeadShape head;
  PolicyOptions policy;
  std::vector<WindowTrace> traces;
  std::vector<std::vector<HeadAttention>> attention;  // of each head
  std::vector<SampleSplit> samples;
  std::vector<std::vector<float>> start;

  Heads(int32_t num_heads, int32_t group, int32_t dim, int32_t bits, int64_t windows,
        int64_t tokens, int64_t steps, int64_t runs = 1)
      : shape{1, num_heads * group, num_heads, dim, DType::kF32, bits}, head{group, dim} {
    ThreadPool pool(1);
    traces = structured_windows(shape, windows, tokens, steps, runs, 3, pool);
    attention.resize(static_cast<size_t>(num_heads));
    const HashSigns signs(shape, kHashSeed);
    for (int32_t h = 0; h < num_heads; ++h) {
      std::vector<HeadWindow> own;
      for (const WindowTrace& trace : traces) {
        for (int64_t run = 0; run < runs; ++run) {
          own.push_back(trace.head(0, h, run));
          attention[h].push_back(measure_attention(head, own.back(), policy, 1 / std::sqrt(dim)));
        }
      }
      samples.push_back(split_samples(own, attention[h], runs));
      start.push_back(projection_matrix(signs.params(0, h)));
    }
  }
  TrainingHead training_head(size_t h) const { return {samples[h].train, start[h]}; }
  std::vector<TrainingHead> all() const {
    std::vector<TrainingHead> heads;
    for (size_t h = 0; h < samples.size(); ++h) heads.push_back(training_head(h));
    return heads;
  }
  std::vector<float> on_cpu(size_t h, const HashTraining& training) const {
    return train_hash(head, samples[h].train, policy, start[h], training);
  }
  Recall recall(size_t h, std::span<const float> weights) const {
    return hash_recall(head, samples[h].held_out, policy, weights, shape.code_bits);
  }
};

HashTraining training_of(int32_t bits, int32_t iterations) {
  HashTraining training;
  training.bits = bits;
  training.iterations = iterations;
  return training;
}

TEST(BatchDraws, AreTheSameForHeadsThatWereRecordedTogetherAndStayInside) {
  const Heads heads(2, 1, 16, 64, 3, 241, 33);
  training::BatchDraws one(heads.samples[0].train, heads.policy, 5);
  training::BatchDraws other(heads.samples[1].train, heads.policy, 5);
  const int64_t count = candidates(heads.policy, 241 - 33 + 1).size();
  ASSERT_EQ(count, 209 - 68);
  for (int i = 0; i < 300; ++i) {
    const training::Batch a = one.next(), b = other.next();
    ASSERT_EQ(a.window, b.window);
    ASSERT_EQ(a.first_key, b.first_key);
    ASSERT_EQ(a.steps, b.steps);
    ASSERT_LT(a.window, 2u);
    ASSERT_EQ(a.num_keys, 128);  // the largest multiple of 16
    ASSERT_GE(a.first_key, 0);
    ASSERT_LE(a.first_key + a.num_keys, count);
    for (const int64_t step : a.steps) ASSERT_TRUE(step >= 0 && step < 33);
  }
}

TEST(PreparedWindow, LabelsFollowTheOrderOfTheKeys) {
  const Heads heads(1, 2, 16, 64, 1, 241, 40);
  const HeadSample& sample = heads.samples[0].train[0];
  training::BatchDraws draws(heads.samples[0].train, heads.policy, 9);
  const std::span<const int32_t> tokens = draws.tokens(0);
  const auto& train = heads.samples[0].train;
  const float scale = training::key_scale(heads.head, train, draws);
  const auto made = training::prepare_window(heads.head, sample, tokens, scale);
  ASSERT_EQ(made.count, std::ssize(tokens));
  EXPECT_FALSE(std::is_sorted(tokens.begin(), tokens.end()));
  int64_t wanted = 0;
  for (int64_t step = sample.first_step; step < sample.end_step; ++step) {
    const auto set = sample.attention->set(step);
    for (int64_t i = 0; i < made.count; ++i) {
      const int32_t token = tokens[i];
      ASSERT_EQ(made.wanted(step, i), ((set[token / 64] >> (token % 64)) & 1u) != 0);
      wanted += made.wanted(step, i);
    }
  }
  EXPECT_GT(wanted, 20 * (sample.end_step - sample.first_step) / 2);
  // Keys are as they are but for one scale, and end in what a bias is learned from.
  const int64_t width = training::input_width(heads.head);
  double lengths = 0;
  for (int64_t i = 0; i < made.count; ++i) {
    double square = 0;
    for (int d = 0; d < 16; ++d) {
      const float key = made.keys[i * width + d];
      ASSERT_EQ(key, scale * sample.window.keys[tokens[i] * 16 + d]);
      square += key * key;
    }
    lengths += std::sqrt(square);
    ASSERT_EQ(made.keys[i * width + 16], training::kBiasInput);
    for (int64_t d = 17; d < width; ++d) ASSERT_EQ(made.keys[i * width + d], 0);
  }
  EXPECT_NEAR(lengths / static_cast<double>(made.count), 4, 1e-4);
  // A query is the group's sum, of length sqrt(dim), and has no bias.
  const int64_t steps = sample.window.num_steps;
  for (int64_t step = 0; step < steps; ++step) {
    double square = 0, dot = 0, own = 0;
    for (int d = 0; d < 16; ++d) {
      const float query = made.queries[step * width + d];
      const float sum =
          sample.window.queries[step * 16 + d] + sample.window.queries[(steps + step) * 16 + d];
      square += query * query;
      dot += query * sum;
      own += sum * sum;
    }
    ASSERT_NEAR(square, 16, 1e-4);
    ASSERT_NEAR(dot, std::sqrt(square * own), 1e-3);
    for (int64_t d = 16; d < width; ++d) ASSERT_EQ(made.queries[step * width + d], 0);
  }
}

TEST(Projection, GoesToTrainingAndBackUnchanged) {
  const HeadShape head{2, 16};
  std::vector<float> start(17 * 64, 0.0f);
  for (int i = 0; i < 16 * 64; ++i) start[i] = static_cast<float>(i % 7 - 3);
  std::vector<float> rows = training::start_rows(head, start, 64);
  const int64_t width = training::input_width(head);
  for (int64_t b = 0; b < 64; ++b) {
    double square = 0, dot = 0, own = 0;
    for (int64_t d = 0; d < 16; ++d) {
      square += rows[b * width + d] * rows[b * width + d];
      dot += rows[b * width + d] * start[d * 64 + b];
      own += start[d * 64 + b] * start[d * 64 + b];
    }
    ASSERT_NEAR(square, 1, 1e-5);
    ASSERT_NEAR(dot, std::sqrt(own), 1e-4);
    for (int64_t d = 16; d < width; ++d) ASSERT_EQ(rows[b * width + d], 0);
    rows[b * width + 16] = 0.5f;
  }
  // On a key k the bit is the sign of k W + bias, in training of (scale k) W + 0.5 kBiasInput.
  const std::vector<float> back = training::as_columns(head, rows, 64, 0.25f);
  ASSERT_EQ(back.size(), 17u * 64);
  for (int64_t b = 0; b < 64; ++b) {
    for (int64_t d = 0; d < 16; ++d) ASSERT_EQ(back[d * 64 + b], rows[b * width + d]);
    ASSERT_EQ(back[16 * 64 + b] * 0.25f, 0.5f * training::kBiasInput);
  }
}

TEST(PreparedWindow, OfALongRunIsASampleOfItsCandidates) {
  const Heads heads(1, 1, 16, 64, 2, 9001, 40, 2);
  const std::vector<HeadSample>& samples = heads.samples[0].train;
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0].window.keys.data(), samples[1].window.keys.data());
  EXPECT_EQ(samples[0].window.num_tokens, 9001 - 2250);
  training::BatchDraws draws(samples, heads.policy, 9);
  std::vector<std::vector<int32_t>> sorted;
  for (size_t w = 0; w < 2; ++w) {
    const std::span<const int32_t> tokens = draws.tokens(w);
    ASSERT_EQ(std::ssize(tokens), training::kMostRunKeys);
    sorted.emplace_back(tokens.begin(), tokens.end());
    std::sort(sorted[w].begin(), sorted[w].end());
    EXPECT_EQ(std::adjacent_find(sorted[w].begin(), sorted[w].end()), sorted[w].end());
    const CandidateRange range = candidates(heads.policy, samples[w].window.context_of(0));
    EXPECT_LT(sorted[w].front(), range.first + 60);  // from the whole of the range
    EXPECT_GE(sorted[w].back(), range.end - 60);
    EXPECT_LT(sorted[w].back(), range.end);
    // Of the exact set a sample has its share.
    const auto made = training::prepare_window(heads.head, samples[w], tokens, 1);
    int64_t wanted = 0, all = 0;
    for (int64_t step = 0; step < 40; ++step) {
      for (int64_t i = 0; i < made.count; ++i) wanted += made.wanted(step, i);
      all += samples[w].attention->sizes[step];
    }
    const double share = static_cast<double>(made.count) / static_cast<double>(range.size());
    EXPECT_NEAR(static_cast<double>(wanted), share * static_cast<double>(all), 0.1 * share * all);
  }
  EXPECT_NE(sorted[0], sorted[1]);
  for (int i = 0; i < 300; ++i) {
    const training::Batch batch = draws.next();
    ASSERT_LE(batch.first_key + batch.num_keys, training::kMostRunKeys);
  }
}

TEST(Runs, AreMeasuredAsWindowsOfTheirOwn) {
  // Two runs of one trace, and the same keys and queries in windows apart.
  const Heads heads(1, 2, 16, 64, 2, 601, 33, 3);
  const std::vector<HeadSample>& together = heads.samples[0].held_out;
  ASSERT_EQ(together.size(), 3u);
  std::vector<std::vector<float>> keys;
  std::vector<HeadSample> apart;
  for (const HeadSample& sample : together) {
    keys.emplace_back(sample.window.keys.begin(), sample.window.keys.end());
    apart.push_back(sample);
    apart.back().window.keys = keys.back();
  }
  const auto of = [&](std::span<const HeadSample> samples) {
    return hash_recall(heads.head, samples, heads.policy, heads.start[0], 64).tokens;
  };
  EXPECT_EQ(of(together), of(apart));
  const std::vector<HeadSample> reversed(apart.rbegin(), apart.rend());
  EXPECT_NEAR(of(std::vector<HeadSample>(together.rbegin(), together.rend())), of(reversed), 1e-12);
  for (size_t run = 0; run < 3; ++run) {
    EXPECT_EQ(together[run].window.num_tokens, 601 - (2 - static_cast<int64_t>(run)) * 100);
    EXPECT_EQ(together[run].window.context_of(32), together[run].window.num_tokens);
  }
}

TEST(HashTrainerPlan, WindowsLieOneAfterAnother) {
  const HashTrainerShape shape{48, 128, {{141, 9}, {2000, 20}, {17, 1}}};
  const HashTrainerPlan plan = plan_hash_trainer(shape);
  EXPECT_EQ(plan.keys, (std::vector<int64_t>{0, 141 * 48, 2141 * 48}));
  EXPECT_EQ(plan.queries, (std::vector<int64_t>{0, 9 * 48, 29 * 48}));
  EXPECT_EQ(plan.labels, (std::vector<int64_t>{0, 9 * 3, 9 * 3 + 20 * 32}));
  EXPECT_EQ(plan.head_keys, 2158 * 48);
  EXPECT_EQ(plan.head_labels, 27 + 640 + 1);
  EXPECT_EQ(plan.most_keys, kMostBatchKeys);
  EXPECT_EQ(plan.head_codes, (1008 + 16) * 128);
  EXPECT_EQ(plan.head_bytes,
            4 * (2158 * 48 + 30 * 48 + 3 * 128 * 48 + 1024 * 128 + 16 * 1008) + 8 * 668);
  // Without a window of 1,008 keys the largest batch is a multiple of 16.
  EXPECT_EQ(plan_hash_trainer({16, 64, {{141, 9}, {40, 9}}}).most_keys, 128);
}

class DeviceTrainingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto facts = device_facts(); !facts) GTEST_SKIP() << facts.error().message;
  }
  ThreadPool pool_{2};
};

// How far apart two trainings are, as a share of how far the first came from its start.
double apart(std::span<const float> a, std::span<const float> b, std::span<const float> start,
             int64_t bits) {
  // The start as training normalises it.
  double difference = 0, way = 0;
  for (int64_t j = 0; j < bits; ++j) {
    double square = 0;
    for (size_t i = j; i < start.size(); i += bits) square += double{start[i]} * start[i];
    for (size_t i = j; i < start.size(); i += bits) {
      difference += (double{a[i]} - b[i]) * (a[i] - b[i]);
      way += std::pow(a[i] - start[i] / std::sqrt(square), 2);
    }
  }
  return std::sqrt(difference / way);
}

TEST_F(DeviceTrainingTest, FewStepsGiveTheWeightsOfTheCpu) {
  struct Case {
    int32_t heads, group, dim, bits;
    int64_t windows, tokens, steps, runs = 1;
  };
  // Odd numbers of heads, groups of 1, 3 and 8, keys that end inside every tile.
  for (const Case& c : {Case{1, 1, 16, 64, 1, 101, 12}, Case{3, 3, 48, 128, 3, 241, 33},
                        Case{2, 8, 80, 64, 2, 401, 18}, Case{1, 4, 128, 256, 2, 1401, 40},
                        Case{2, 2, 64, 128, 2, 9001, 20, 3}}) {
    SCOPED_TRACE(c.dim);
    const Heads heads(c.heads, c.group, c.dim, c.bits, c.windows, c.tokens, c.steps, c.runs);
    const HashTraining training = training_of(c.bits, 12);
    auto device = DeviceTraining::create(0);
    ASSERT_TRUE(device) << device.error().to_string();
    const auto trained = device->train(heads.head, heads.all(), heads.policy, training, pool_);
    ASSERT_TRUE(trained) << trained.error().to_string();
    ASSERT_EQ(trained->size(), static_cast<size_t>(c.heads));
    for (int32_t h = 0; h < c.heads; ++h) {
      // Sums in another order: a weight may round to the bf16 beside, and where a gradient is near
      // zero Adam's first steps may take either sign.
      EXPECT_LT(apart(heads.on_cpu(h, training), (*trained)[h], heads.start[h], c.bits), 0.01) << h;
    }
    EXPECT_GT(device->peak_bytes(), 0);
  }
}

TEST_F(DeviceTrainingTest, AHeadDoesNotDependOnTheOthersNorOnTheRun) {
  const Heads heads(5, 2, 64, 128, 2, 401, 40);
  const HashTraining training = training_of(128, 20);
  auto device = DeviceTraining::create(0);
  ASSERT_TRUE(device) << device.error().to_string();
  const std::vector<TrainingHead> all = heads.all();
  const auto together = device->train(heads.head, all, heads.policy, training, pool_);
  const auto again = device->train(heads.head, all, heads.policy, training, pool_);
  ASSERT_TRUE(together && again);
  EXPECT_EQ(*together, *again);
  for (size_t h = 0; h < all.size(); ++h) {
    const auto alone = device->train(heads.head, {&all[h], 1}, heads.policy, training, pool_);
    ASSERT_TRUE(alone);
    EXPECT_EQ((*alone)[0], (*together)[h]) << h;
  }
  EXPECT_NE((*together)[0], (*together)[1]);
}

TEST_F(DeviceTrainingTest, RecallIsThatOfTheCpu) {
  for (const int32_t bits : {64, 128}) {
    const Heads heads(2, 2, 128, bits, 4, 901, 40);
    const HashTraining training = training_of(bits, 200);
    auto device = DeviceTraining::create(0);
    ASSERT_TRUE(device) << device.error().to_string();
    const auto trained = device->train(heads.head, heads.all(), heads.policy, training, pool_);
    ASSERT_TRUE(trained) << trained.error().to_string();
    double gpu = 0, cpu = 0, random = 0;
    for (size_t h = 0; h < 2; ++h) {
      gpu += heads.recall(h, (*trained)[h]).tokens / 2;
      cpu += heads.recall(h, heads.on_cpu(h, training)).tokens / 2;
      random += heads.recall(h, heads.start[h]).tokens / 2;
    }
    EXPECT_NEAR(gpu, cpu, 0.01) << bits;
    EXPECT_GT(gpu, random + 0.05) << bits;
  }
}

TEST_F(DeviceTrainingTest, AProfileMeasuredWithItIsThatOfTheCpu) {
  const KvShape shape{2, 4, 2, 32, DType::kF32, 64};
  const std::vector<WindowTrace> traces = structured_windows(shape, 2, 301, 20, 2, 8, pool_);
  MeasureOptions options;
  options.training = training_of(64, 60);
  const auto cpu = measure_heads(shape, RopeConfig{}, traces, options, pool_, {});
  ASSERT_TRUE(cpu);
  auto device = DeviceTraining::create(0);
  ASSERT_TRUE(device) << device.error().to_string();
  options.device = &*device;
  int64_t last = 0;
  MeasureCalls calls;
  calls.on_progress = [&](int64_t done, int64_t) { last = done; };
  const auto gpu = measure_heads(shape, RopeConfig{}, traces, options, pool_, calls);
  ASSERT_TRUE(gpu) << gpu.error().to_string();
  EXPECT_EQ(last, 4);
  EXPECT_EQ(gpu->statistics.overlap, cpu->statistics.overlap);
  EXPECT_EQ(gpu->statistics.cosine, cpu->statistics.cosine);
  EXPECT_EQ(gpu->statistics.trial_fetched, cpu->statistics.trial_fetched);
  EXPECT_EQ(gpu->statistics.recall_random, cpu->statistics.recall_random);
  EXPECT_EQ(gpu->heads.difficulty, cpu->heads.difficulty);
  for (size_t h = 0; h < 4; ++h) {
    EXPECT_NEAR(gpu->statistics.recall_trained[h], cpu->statistics.recall_trained[h], 0.03) << h;
  }
  calls.keep_going = [] { return false; };
  const auto stopped = measure_heads(shape, RopeConfig{}, traces, options, pool_, calls);
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code, ErrorCode::kCancelled);
}

TEST_F(DeviceTrainingTest, HeadsThatDoNotFitTogetherTakeTurns) {
  const KvShape shape{1, 5, 5, 32, DType::kF32, 64};
  const std::vector<WindowTrace> traces = structured_windows(shape, 2, 301, 20, 2, 8, pool_);
  MeasureOptions options;
  options.training = training_of(64, 30);
  // Two of five at once, so the last turn has one.
  HashTrainerShape of_head{32 + training::kBiasInputs, 64, {}};
  for (int64_t run = 0; run < 2; ++run) {
    const int64_t context = traces[0].head(0, 0, run).context_of(0);
    of_head.windows.push_back({candidates(options.policy, context).size(), 20});
  }
  const int64_t two = plan_hash_trainer(of_head).head_bytes * 5 / 2;
  ASSERT_EQ(*HashTrainer::heads_that_fit(of_head, two), 2);
  std::vector<std::vector<float>> weights;
  for (const int64_t limit : {int64_t{0}, two}) {
    auto device = DeviceTraining::create(limit);
    ASSERT_TRUE(device) << device.error().to_string();
    options.device = &*device;
    const auto made = measure_heads(shape, RopeConfig{}, traces, options, pool_, {});
    ASSERT_TRUE(made) << made.error().to_string();
    weights.push_back(made->heads.hash_weights);
  }
  EXPECT_EQ(weights[0], weights[1]);
}

TEST_F(DeviceTrainingTest, SaysWhenNotOneHeadFits) {
  const Heads heads(1, 2, 64, 128, 2, 401, 40);
  auto device = DeviceTraining::create(1 << 16);
  ASSERT_TRUE(device) << device.error().to_string();
  const auto none = device->heads_at_once(heads.head, heads.samples[0].train, heads.policy, 128);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kDeviceMemory);
  auto roomy = DeviceTraining::create(int64_t{64} << 20);
  ASSERT_TRUE(roomy);
  const auto some = roomy->heads_at_once(heads.head, heads.samples[0].train, heads.policy, 128);
  ASSERT_TRUE(some);
  EXPECT_GE(*some, 10);
}

}  // namespace
}  // namespace clo
