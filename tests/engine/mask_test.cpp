// Requests with masked tokens: nothing of these reaches the answer, in no policy, and nothing of
// the mask reaches other requests.
#include "loaded_engine.h"

namespace clo {
namespace {

constexpr int64_t kPrompt = 700, kNew = 60;

struct Outcome {
  std::vector<std::vector<float>> logits;
  Report report;
};

class Mask : public testing::Test {
 protected:
  void load(bool keep_prefixes = true, WeightType dtype = WeightType::kAuto) {
    EngineOptions options = tiny_options("llama31");
    options.keep_prefixes = keep_prefixes;
    options.dtype = dtype;
    engine_ = load_engine(options);
    ASSERT_NE(engine_, nullptr);
    prompt_ = random_ids(kPrompt, engine_->vocab_size(), 7);
  }
  Outcome run(const std::vector<int32_t>& prompt, const PolicyOptions& policy,
              const std::vector<TokenRange>& masked) {
    Outcome result;
    Request request = ids_request(prompt, kNew, policy);
    request.masked_ranges = masked;
    // The same tokens everywhere: logits of every step can be compared.
    request.forced_tokens = random_ids(kNew, engine_->vocab_size(), 8);
    request.on_logits = [&](std::span<const float> row) {
      result.logits.emplace_back(row.begin(), row.end());
    };
    result.report = answer_of(*engine_, std::move(request)).report;
    return result;
  }
  static double worst(const Outcome& a, const Outcome& b) {
    EXPECT_EQ(a.logits.size(), b.logits.size());
    double worst = 0;
    for (size_t i = 0; i < a.logits.size(); ++i) {
      for (size_t j = 0; j < a.logits[i].size(); ++j) {
        worst = std::max(worst, std::abs(double{a.logits[i][j]} - b.logits[i][j]));
      }
    }
    return worst;
  }
  // Other tokens inside the ranges.
  std::vector<int32_t> with_others(const std::vector<TokenRange>& ranges) const {
    std::vector<int32_t> changed = prompt_;
    for (const TokenRange& range : ranges) {
      for (int64_t t = range.first; t < range.end; ++t) {
        changed[static_cast<size_t>(t)] =
            static_cast<int32_t>((changed[static_cast<size_t>(t)] + 1) % engine_->vocab_size());
      }
    }
    return changed;
  }

  const std::vector<TokenRange> masked_ = {{0, 2}, {30, 31}, {100, 560}, {640, 699}};
  std::unique_ptr<Engine> engine_;
  std::vector<int32_t> prompt_;
};

std::vector<PolicyOptions> policies() {
  std::vector<PolicyOptions> all = {*preset("dense"), evictable("default"), evictable("clo-paper"),
                                    *preset("hata")};
  all.push_back(evictable("default"));
  all.back().select = Select::kExact;
  all.push_back(evictable("default"));
  all.back().select = Select::kRandom;
  all.push_back(evictable("default"));
  all.back().hit_test = HitTest::kDrift;
  all.push_back(evictable("default"));
  all.back().quality = 0.95;
  for (PolicyOptions& policy : all) policy.set_tokens = 40;  // of 178 visible tokens and more
  return all;
}

TEST_F(Mask, WhatMaskedTokensAreChangesNoBit) {
  load();
  for (const PolicyOptions& policy : policies()) {
    if (policy.select == Select::kRandom) continue;  // every request draws anew
    SCOPED_TRACE(describe(policy));
    const Outcome a = run(prompt_, policy, masked_), b = run(with_others(masked_), policy, masked_);
    EXPECT_TRUE(a.logits == b.logits);
    EXPECT_GT(worst(a, run(with_others(masked_), policy, {})), 1e-3);
    EXPECT_EQ(a.report.share_attended < 1, policy.select != Select::kNone);
  }
}

TEST_F(Mask, ACoveringSetEqualsDense) {
  load();
  const Outcome dense = run(prompt_, *preset("dense"), masked_);
  const int64_t visible = kPrompt - 2 - 1 - 460 - 59;
  EXPECT_EQ(dense.report.masked_tokens, kPrompt - visible);
  EXPECT_NE(report_text(dense.report).find("(0 reused, 522 masked)"), std::string::npos);
  EXPECT_NE(report_json(dense.report).find("\"masked_tokens\":522"), std::string::npos);
  // The first of the new tokens comes from the prompt's logits; the others from a step each.
  int64_t rows = 0;
  for (int64_t step = 1; step < kNew; ++step) rows += visible + step;
  EXPECT_EQ(dense.report.total.rows_in_context, rows * dense.report.num_heads);
  for (PolicyOptions policy : policies()) {
    SCOPED_TRACE(describe(policy));
    if (policy.quality) continue;  // a dial sets k itself
    policy.set_tokens = visible + kNew;
    const Outcome found = run(prompt_, policy, masked_);
    EXPECT_LT(worst(found, dense), 1e-4);
    EXPECT_EQ(found.report.total.rows_attended, found.report.total.rows_in_context);
  }
}

// Rotary embeddings see distances alone, so a prompt whose beginning is masked is the rest of it.
TEST_F(Mask, AMaskedBeginningEqualsAShorterPrompt) {
  load(true, WeightType::kF32);
  const std::vector<int32_t> rest(prompt_.begin() + 300, prompt_.end());
  for (const char* name : {"dense", "default"}) {
    PolicyOptions policy = evictable(name);
    policy.sink = 0;  // the first tokens, which the two do not share
    policy.select = policy.select == Select::kNone ? Select::kNone : Select::kExact;
    const Outcome masked = run(prompt_, policy, {{0, 300}}), shorter = run(rest, policy, {});
    EXPECT_LT(worst(masked, shorter), 2e-3) << name;
    EXPECT_GT(worst(masked, run(prompt_, policy, {})), 0.01) << name;
    EXPECT_EQ(masked.report.total.rows_in_context, shorter.report.total.rows_in_context);
  }
}

TEST_F(Mask, PagesAreNeitherFoundNorLeft) {
  load();
  const PolicyOptions policy = evictable("default");
  const Outcome first = run(prompt_, policy, masked_);
  const Outcome open = run(prompt_, policy, {});
  EXPECT_EQ(open.report.reused_tokens, 0) << "a masked prompt left its pages";
  const Outcome again = run(prompt_, policy, masked_);
  EXPECT_EQ(again.report.reused_tokens, 0) << "a masked prompt found pages made without a mask";
  EXPECT_TRUE(again.logits == first.logits);
  // Without a mask the same prompt is found, so that the above could have failed.
  EXPECT_EQ(run(prompt_, policy, {}).report.reused_tokens, 512);
  EXPECT_EQ(engine_->memory().pages_in_use, 0);
  load(false);
  EXPECT_TRUE(run(prompt_, policy, masked_).logits == first.logits);
  EXPECT_TRUE(run(prompt_, policy, {}).logits == open.logits);
}

TEST_F(Mask, ABatchOfBothIsAsEachAlone) {
  load();
  const PolicyOptions policy = evictable("default");
  const Outcome masked = run(prompt_, policy, masked_), open = run(prompt_, policy, {});
  engine_->drop_prefixes();
  std::vector<Outcome> together(2);
  std::vector<RequestId> ids;
  for (size_t i = 0; i < 2; ++i) {
    Request request = ids_request(prompt_, kNew, policy);
    if (i == 0) request.masked_ranges = masked_;
    request.forced_tokens = random_ids(kNew, engine_->vocab_size(), 8);
    request.on_logits = [&together, i](std::span<const float> row) {
      together[i].logits.emplace_back(row.begin(), row.end());
    };
    const auto id = engine_->submit(std::move(request));
    ASSERT_TRUE(id) << id.error().to_string();
    ids.push_back(*id);
  }
  while (engine_->step()) {
  }
  for (const RequestId id : ids) ASSERT_FALSE(engine_->take(id)->error);
  EXPECT_TRUE(together[0].logits == masked.logits);
  EXPECT_TRUE(together[1].logits == open.logits);
}

TEST_F(Mask, BadRangesAreRefused) {
  load();
  const auto refusal = [&](const std::vector<TokenRange>& masked,
                           const std::vector<TokenRange>& watched) {
    Request request = ids_request({5, 6, 7, 8, 9}, 5, *preset("dense"));
    request.masked_ranges = masked;
    request.watched_ranges = watched;
    const auto id = engine_->submit(std::move(request));
    return id ? Error{} : id.error();
  };
  for (const std::vector<TokenRange>& ranges :
       {std::vector<TokenRange>{{1, 1}}, {{2, 6}}, {{1, 3}, {2, 4}}, {{2, 3}, {0, 1}}, {{-1, 2}}}) {
    const Error error = refusal(ranges, {});
    EXPECT_EQ(error.where, "masked_ranges");
    EXPECT_NE(error.message.find("5 tokens"), std::string::npos) << error.message;
  }
  const Error last = refusal({{0, 1}, {3, 5}}, {});
  EXPECT_EQ(last.where, "masked_ranges");
  EXPECT_NE(last.message.find("last prompt token"), std::string::npos) << last.message;
  const Error both = refusal({{1, 3}}, {{0, 1}, {2, 4}});
  EXPECT_EQ(both.where, "masked_ranges");
  EXPECT_NE(both.message.find("[2, 4)"), std::string::npos) << both.message;
  EXPECT_TRUE(refusal({{1, 3}}, {{0, 1}, {3, 4}}).message.empty());
}

}  // namespace
}  // namespace clo
