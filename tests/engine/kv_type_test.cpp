// --kv-type through whole requests: where rows live changes nothing, what they are is reported, and
// weights keep a type of their own.
#include <cmath>

#include "eval/documents.h"
#include "loaded_engine.h"

namespace clo {
namespace {

using Rows = std::vector<std::vector<float>>;

struct Ran {
  Response response;
  Rows logits;
};

Ran run(Engine& engine, Request request) {
  Ran ran;
  request.on_logits = [&](std::span<const float> row) {
    ran.logits.emplace_back(row.begin(), row.end());
  };
  ran.response = answer_of(engine, std::move(request));
  return ran;
}

double worst_difference(const Rows& a, const Rows& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    for (size_t j = 0; j < a[i].size(); ++j) {
      worst = std::max(worst, std::abs(double{a[i][j]} - b[i][j]));
    }
  }
  return worst;
}

EngineOptions options_with(const std::string& model, KvType kv_type) {
  EngineOptions options = tiny_options(model);
  options.kv_type = kv_type;
  return options;
}

struct TypeCase {
  const char* name;
  KvType type;
  int64_t row_bytes, full_row_bytes;  // of llama31: head_dim 16, f32
};
constexpr TypeCase kTypes[] = {{"f32", KvType::kF32, 128, 128},
                               {"bf16", KvType::kBF16, 64, 64},
                               {"f16", KvType::kF16, 64, 64},
                               {"int8", KvType::kInt8, 48, 128},
                               {"fp8", KvType::kFp8, 32, 128}};

class EveryKvType : public testing::TestWithParam<TypeCase> {};
INSTANTIATE_TEST_SUITE_P(KvTypes, EveryKvType, testing::ValuesIn(kTypes),
                         [](const auto& instance) { return std::string(instance.param.name); });

constexpr int64_t kPrompt = 700, kNew = 150;

TEST_P(EveryKvType, OffloadedEqualsResidentEqualsDense) {
  EngineOptions options = options_with("llama31", GetParam().type);
  // A prefix that a request before it left would supply sinks that went through the store.
  options.keep_prefixes = false;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  const auto prompt = random_ids(kPrompt, engine->vocab_size(), 7);
  PolicyOptions offloaded = evictable("default");
  offloaded.set_tokens = kPrompt + kNew;
  PolicyOptions resident = offloaded;
  resident.persistent = PolicyOptions::Persistent::kAll;
  const Ran dense = run(*engine, ids_request(prompt, kNew, *preset("dense")));
  const Ran near = run(*engine, ids_request(prompt, kNew, resident));
  const Ran far = run(*engine, ids_request(prompt, kNew, offloaded));

  EXPECT_EQ(near.response.tokens, dense.response.tokens);
  EXPECT_EQ(far.response.tokens, dense.response.tokens);
  // As in policy_equality_test: only the order of sums differs.
  EXPECT_LT(worst_difference(near.logits, dense.logits), 1e-4);
  EXPECT_LT(worst_difference(far.logits, dense.logits), 1e-4);
  const KvCounters& total = far.response.report.total;
  EXPECT_GT(total.rows_fetched, 0) << "nothing was offloaded, so nothing was tested";
  EXPECT_EQ(total.rows_attended, total.rows_in_context);
  EXPECT_EQ(near.response.report.total.rows_attended, total.rows_attended);

  const Report& report = far.response.report;
  EXPECT_EQ(report.kv_type, GetParam().name);
  EXPECT_EQ(report.row_bytes, GetParam().row_bytes);
  EXPECT_EQ(report.full_row_bytes, GetParam().full_row_bytes);
  // 4 sinks and 128 of the ring in each of 4 heads and every step, where they are another kind.
  const bool mixed = report.row_bytes != report.full_row_bytes;
  EXPECT_EQ(total.full_rows_attended, mixed ? (4 + 128) * 4 * report.decode_steps : 0);
  EXPECT_NEAR(
      report.bytes_attended_per_token * static_cast<double>(report.decode_steps),
      static_cast<double>((total.rows_attended - total.full_rows_attended) * report.row_bytes +
                          total.full_rows_attended * report.full_row_bytes),
      1);
}

// Rows in another type give other logits, near those of full rows: near enough to be the same
// model, far enough to show that the type is used. The counts stay the counts.
TEST(KvTypes, AreUsedAndNear) {
  Ran full;
  for (const TypeCase& kind : kTypes) {
    EngineOptions options = options_with("llama31", kind.type);
    options.keep_prefixes = false;
    const auto engine = load_engine(options);
    ASSERT_NE(engine, nullptr);
    Request request =
        ids_request(random_ids(kPrompt, engine->vocab_size(), 8), 40, *preset("dense"));
    request.forced_tokens = random_ids(40, engine->vocab_size(), 9);
    Ran ran = run(*engine, std::move(request));
    if (kind.type == KvType::kF32) {
      full = std::move(ran);
      continue;
    }
    const double worst = worst_difference(ran.logits, full.logits);
    EXPECT_GT(worst, 1e-5) << kind.name;
    double largest = 0;
    for (const auto& row : full.logits) {
      for (const float x : row) largest = std::max(largest, std::abs(double{x}));
    }
    EXPECT_LT(worst, 0.1 * largest) << kind.name;
    EXPECT_EQ(ran.response.report.total.rows_in_context,
              full.response.report.total.rows_in_context);
  }
}

// The first logits come from prefill, which reads every row in its stored form: chunks, and what a
// stored prefix supplied, change nothing. (The chunks of both runs end alike: sums of a GEMM may
// depend on its rows.)
TEST_P(EveryKvType, APrefixGivesTheSamePromptAndTheSameAnswer) {
  EngineOptions options = options_with("recall-7m", GetParam().type);
  options.prefill_chunk = 256;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  ItemRandom random(5);
  std::vector<Fact> facts;
  for (const double depth : {0.1, 0.4, 0.8}) {
    facts.push_back(make_fact(FactForm::kNumber, random));
    facts.back().depth = depth;
  }
  const auto document = plant_facts(facts, FillerText::prose(3), 1200, 0, [&](std::string_view t) {
    const auto ids = engine->encode(t);
    return ids ? Result<int64_t>(std::ssize(*ids)) : Result<int64_t>(ids.error());
  });
  ASSERT_TRUE(document);
  for (const char* name : {"dense", "default", "hata"}) {
    for (const Fact& fact : facts) {
      engine->drop_prefixes();
      Request request;
      request.messages = {{"user", *document + "\n" + fact.question()}};
      request.max_new_tokens = 40;
      request.stop = {"\n"};  // what the model is sure of; behind it, it runs on
      request.sampling = SamplingOptions{};
      request.policy = *preset(name);
      const Ran first = run(*engine, request);
      const Ran second = run(*engine, request);
      EXPECT_EQ(first.response.report.reused_tokens, 0);
      EXPECT_GE(second.response.report.reused_tokens, 1024);
      EXPECT_EQ(first.logits.front(), second.logits.front()) << name;
      EXPECT_EQ(first.response.text, second.response.text) << name;
      EXPECT_TRUE(is_right(fact, first.response.text)) << name << ": " << first.response.text;
    }
  }
}

TEST_P(EveryKvType, EachSequenceOfABatchAnswersAsIfAlone) {
  EngineOptions options = options_with("qwen3", GetParam().type);
  options.keep_prefixes = false;
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  const std::vector<std::string> presets = {"default", "dense", "hata", "clo-paper"};
  const std::vector<int64_t> lengths = {5, 300, 701, 512};
  std::vector<Request> requests;
  std::vector<Rows> alone, together(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    requests.push_back(ids_request(random_ids(lengths[i], engine->vocab_size(), 100 + i),
                                   40 + 5 * static_cast<int64_t>(i), *preset(presets[i])));
    alone.push_back(run(*engine, requests[i]).logits);
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    requests[i].on_logits = [&rows = together[i]](std::span<const float> row) {
      rows.emplace_back(row.begin(), row.end());
    };
    ASSERT_TRUE(engine->submit(requests[i]));
    for (int step = 0; step < 7; ++step) engine->step();
  }
  while (engine->step()) {
  }
  for (size_t i = 0; i < lengths.size(); ++i) EXPECT_EQ(together[i], alone[i]) << i;
}

TEST(KvTypes, WeightsKeepATypeOfTheirOwn) {
  // What is in use before any request: weights and workspace.
  const auto idle_bytes = [](WeightType dtype, KvType kv_type) {
    EngineOptions options = options_with("llama31", kv_type);
    options.dtype = dtype;
    const auto engine = load_engine(options);
    return engine == nullptr ? 0 : engine->memory().device_used_bytes;
  };
  const int64_t bf16 = idle_bytes(WeightType::kBF16, KvType::kAuto);
  const int64_t f32 = idle_bytes(WeightType::kF32, KvType::kAuto);
  EXPECT_LT(bf16, f32);
  for (const KvType type : {KvType::kF32, KvType::kF16, KvType::kInt8, KvType::kFp8}) {
    EXPECT_EQ(idle_bytes(WeightType::kBF16, type), bf16);
    EXPECT_EQ(idle_bytes(WeightType::kF32, type), f32);
  }
}

// The mass that all rows keep is 1: what is read, full rows in sink and ring and stored ones in
// slots, is compared with the same rows in the same forms from where they all are.
TEST_P(EveryKvType, ASetThatCoversEverythingKeepsAllMass) {
  const auto engine = load_engine(options_with("llama31", GetParam().type));
  ASSERT_NE(engine, nullptr);
  PolicyOptions policy = evictable("default");
  policy.set_tokens = kPrompt + 20;
  Request request = ids_request(random_ids(kPrompt, engine->vocab_size(), 10), 20, policy);
  request.measure_mass = true;
  const Report report = run(*engine, std::move(request)).response.report;
  ASSERT_EQ(report.total.rows_attended, report.total.rows_in_context);
  // Four query heads in two layers, at every step.
  EXPECT_EQ(report.total.mass_samples, 8 * report.decode_steps);
  EXPECT_NEAR(report.total.mean_mass_kept(), 1, 1e-5);
  EXPECT_EQ(report.total.query_cosine_samples, 8 * report.decode_steps);
  EXPECT_LT(std::abs(report.total.mean_query_cosine()), 1);
}

}  // namespace
}  // namespace clo
