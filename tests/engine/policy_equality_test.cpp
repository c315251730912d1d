// Offloaded equals dense when k covers the whole context, with rows really fetched; the reuse
// rule's two ends; host rows out of reach while attention runs (guard_host_rows is on throughout).
#include "loaded_engine.h"

namespace clo {
namespace {

struct Case {
  const char* name;
  PolicyOptions policy;
};

PolicyOptions with(const std::string& preset_name, void (*change)(PolicyOptions&)) {
  PolicyOptions policy = evictable(preset_name);
  change(policy);
  return policy;
}

std::vector<Case> cases() {
  return {
      {"default", evictable("default")},
      {"hata", evictable("hata")},
      {"clo_paper", evictable("clo-paper")},
      {"hash", with("default", [](PolicyOptions& p) { p.select = Select::kHash; })},
      {"exact", with("default", [](PolicyOptions& p) { p.select = Select::kExact; })},
      {"random", with("default", [](PolicyOptions& p) { p.select = Select::kRandom; })},
      {"whole", with("default", [](PolicyOptions& p) { p.fetch = Fetch::kWhole; })},
      {"previous_step",
       with("default", [](PolicyOptions& p) { p.predict = Predict::kPreviousStep; })},
      {"previous_step_corrected", with("default",
                                       [](PolicyOptions& p) {
                                         p.predict = Predict::kPreviousStep;
                                         p.correction = Correction::kTrueQuery;
                                       })},
      {"previous_layer_corrected", with("clo-paper",
                                        [](PolicyOptions& p) {
                                          p.correction = Correction::kTrueQuery;
                                          p.fetch = Fetch::kDelta;
                                        })},
      {"all_heads_aggregate",
       with("default", [](PolicyOptions& p) { p.aggregate = Aggregate::kAll; })},
      {"mean_aggregate", with("default", [](PolicyOptions& p) { p.aggregate = Aggregate::kMean; })},
      {"one_dense_layer", with("default", [](PolicyOptions& p) { p.dense_layers = 1; })},
      {"one_persistent_head",
       with("default", [](PolicyOptions& p) { p.persistent_per_layer = 1; })},
      {"no_sinks", with("default", [](PolicyOptions& p) { p.sink = 0; })},
      {"short_ring", with("default",
                          [](PolicyOptions& p) {
                            p.recent = 1;
                            p.max_label_age = 3;
                          })},
      {"frozen", with("default",
                      [](PolicyOptions& p) {
                        p.threshold = -1;
                        p.max_label_age = 0;
                      })},
  };
}

constexpr int64_t kPrompt = 700, kNew = 150;

class CoveringSet : public testing::TestWithParam<Case> {};

TEST_P(CoveringSet, EqualsDense) {
  const auto engine = load_engine(tiny_options("llama31"));
  ASSERT_NE(engine, nullptr);
  const std::vector<int32_t> prompt = random_ids(kPrompt, engine->vocab_size(), 7);
  std::vector<std::vector<float>> expected, found;
  const auto keep = [](std::vector<std::vector<float>>& rows) {
    return [&rows](std::span<const float> row) { rows.emplace_back(row.begin(), row.end()); };
  };
  Request dense = ids_request(prompt, kNew, *preset("dense"));
  dense.on_logits = keep(expected);
  const Response reference = answer_of(*engine, std::move(dense));

  PolicyOptions policy = GetParam().policy;
  policy.set_tokens = kPrompt + kNew;
  Request request = ids_request(prompt, kNew, policy);
  request.on_logits = keep(found);
  const Response answer = answer_of(*engine, std::move(request));

  EXPECT_EQ(answer.tokens, reference.tokens);
  ASSERT_EQ(found.size(), expected.size());
  double worst = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    for (size_t j = 0; j < found[i].size(); ++j) {
      worst = std::max(worst, std::abs(double{found[i][j]} - expected[i][j]));
    }
  }
  // Rows in slots are read in another order than rows in place: only rounding differs.
  EXPECT_LT(worst, 1e-4);
  const KvCounters& total = answer.report.total;
  EXPECT_GT(total.rows_fetched, 0) << "nothing was offloaded, so nothing was tested";
  EXPECT_EQ(total.rows_attended, total.rows_in_context);
  EXPECT_DOUBLE_EQ(answer.report.share_attended, 1);
}

INSTANTIATE_TEST_SUITE_P(Policies, CoveringSet, testing::ValuesIn(cases()),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(ReuseRule, ThresholdAboveOneIsPlainTopK) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  const auto prompt = random_ids(900, engine->vocab_size(), 3);
  PolicyOptions always = evictable("default");
  always.threshold = 1.5;
  always.select = Select::kHash;  // as hata
  const Response reselecting = answer_of(*engine, ids_request(prompt, 80, always));
  EXPECT_EQ(reselecting.report.total.hits, 0);
  EXPECT_GT(reselecting.report.total.misses, 0);
  // hata chooses at every step among resident rows: the same sets, so the same answer.
  const Response plain = answer_of(*engine, ids_request(prompt, 80, *preset("hata")));
  EXPECT_EQ(reselecting.tokens, plain.tokens);
  EXPECT_EQ(plain.report.total.rows_fetched, 0);
  EXPECT_LT(plain.report.share_attended, 0.9);
}

TEST(ReuseRule, ThresholdMinusOneFreezesTheSet) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  PolicyOptions frozen = evictable("default");
  frozen.threshold = -1;
  frozen.max_label_age = 0;
  const Response answer =
      answer_of(*engine, ids_request(random_ids(900, engine->vocab_size(), 4), 80, frozen));
  EXPECT_EQ(answer.report.total.misses + answer.report.total.aged, 0);
  EXPECT_EQ(answer.report.total.rows_fetched, 0);
  EXPECT_DOUBLE_EQ(answer.report.hit_rate, 1);
  EXPECT_GT(answer.report.total.rows_primed, 0);
}

TEST(ReuseRule, AnOldLabelIsReplaced) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  PolicyOptions policy = evictable("default");
  policy.threshold = -1;
  policy.max_label_age = 8;
  const Response answer =
      answer_of(*engine, ids_request(random_ids(900, engine->vocab_size(), 5), 41, policy));
  // 40 decode steps; a set lives 8 of them and falls at the 9th: 4 times in each of 4 heads.
  EXPECT_EQ(answer.report.total.aged, 4 * 4);
  EXPECT_EQ(answer.report.total.misses, 0);
}

TEST(Policy, DeltaMovesFewerRowsThanWholeAndAnswersTheSame) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  const auto prompt = random_ids(900, engine->vocab_size(), 6);
  PolicyOptions delta = evictable("default"), whole = delta;
  whole.fetch = Fetch::kWhole;
  const Response a = answer_of(*engine, ids_request(prompt, 60, delta));
  const Response b = answer_of(*engine, ids_request(prompt, 60, whole));
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.report.total.rows_requested, b.report.total.rows_requested);
  EXPECT_LT(a.report.total.rows_fetched, b.report.total.rows_fetched);
  EXPECT_EQ(b.report.total.rows_saved_by_delta, 0);
  EXPECT_EQ(a.report.total.rows_fetched + a.report.total.rows_saved_by_delta,
            a.report.total.rows_requested);
}

TEST(Policy, APersistentHeadAttendsItsSetAndFetchesNothing) {
  const auto engine = load_engine(tiny_options("llama3"));
  ASSERT_NE(engine, nullptr);
  const auto prompt = random_ids(900, engine->vocab_size(), 8);
  PolicyOptions none = evictable("default"), all = none;
  all.persistent = PolicyOptions::Persistent::kAll;
  const Response offloaded = answer_of(*engine, ids_request(prompt, 60, none));
  const Response resident = answer_of(*engine, ids_request(prompt, 60, all));
  // Where rows live is budget, not accuracy.
  EXPECT_EQ(offloaded.tokens, resident.tokens);
  EXPECT_EQ(resident.report.total.rows_fetched, 0);
  EXPECT_NEAR(offloaded.report.share_attended, resident.report.share_attended, 1e-9);
}

}  // namespace
}  // namespace clo
