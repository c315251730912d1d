#include "eval/suite_run.h"

#include "base/try.h"
#include "eval/scorers.h"
#include "eval/text_pieces.h"

namespace clo {

namespace {

class ItemRun {
 public:
  ItemRun(Engine& engine, const EvalItem& item, const PolicyOptions& policy)
      : engine_(engine), prompts_(engine), item_(item), policy_(policy) {}

  Result<PolicyRecord> run(SolveMode mode) {
    Request request = prompts_.request(item_);
    if (mode == SolveMode::kDirect) {
      CLO_ASSIGN(record_.answer, ask(std::move(request), item_.text));
    } else {
      CLO_TRY(recite());
      // The evidence stands in the conversation's first turn, or, as the model wrote it, nowhere.
      const bool keep = mode == SolveMode::kKeep;
      const std::vector<std::string> turns =
          keep ? std::vector<std::string>{item_.recite, record_.recitation, item_.question}
               : std::vector<std::string>{"These facts are known:\n" + record_.recitation + "\n\n" +
                                          item_.question};
      prompts_.set_turns(item_, turns, request);
      CLO_ASSIGN(record_.answer, ask(std::move(request), keep ? item_.recite : ""));
    }
    record_.score = score_answer(item_, record_.answer);
    for (const KvCounters& layer : layers_) {
      if (layer.watched_rows == 0) continue;
      record_.layer_gold.push_back(static_cast<double>(layer.watched_rows_attended) /
                                   static_cast<double>(layer.watched_rows));
    }
    return std::move(record_);
  }

  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t gold_tokens() const { return gold_tokens_; }

 private:
  // `with_gold`: the turn in the prompt that the item's evidence stands in; "": none.
  Result<std::string> ask(Request request, const std::string& with_gold) {
    request.policy = policy_;
    if (!with_gold.empty()) {
      CLO_ASSIGN(const auto gold, prompts_.token_ranges(request, with_gold, item_.gold));
      gold_tokens_ = 0;
      for (const TokenRange& range : gold) gold_tokens_ += range.end - range.first;
      if (engine_.can_watch_rows()) request.watched_ranges = gold;
    }
    request.measure_mass = true;
    CLO_ASSIGN(const Response response, engine_.generate(std::move(request)));
    if (response.error) return *response.error;
    const Report& report = response.report;
    prompt_tokens_ = std::max(prompt_tokens_, report.prompt_tokens);
    record_.counters += report.total;
    record_.decode_steps += report.decode_steps;
    record_.row_bytes = report.row_bytes;
    record_.seconds += report.prefill_seconds + report.decode_seconds;
    layers_.resize(report.layers.size());
    for (size_t i = 0; i < report.layers.size(); ++i) layers_[i] += report.layers[i];
    return response.text;
  }

  Status recite() {
    Request request = prompts_.request(item_);
    prompts_.set_turns(item_, {item_.recite}, request);
    request.answer_prefix.clear();
    request.stop.clear();
    request.max_new_tokens = kReciteTokens;
    CLO_ASSIGN(record_.recitation, ask(std::move(request), item_.recite));
    record_.recitation = std::string(trimmed(record_.recitation));
    const auto even = [](std::string_view text) {
      std::string out;
      for (const std::string& word : split_words(text)) out += word + " ";
      return out;
    };
    const std::string recitation = even(record_.recitation);
    int64_t found = 0;
    for (const TextSpan& span : item_.gold) {
      const std::string piece =
          even(std::string_view(item_.text).substr(span.begin, span.end - span.begin));
      found += recitation.find(piece) != std::string::npos;
    }
    if (!item_.gold.empty()) {
      record_.recited = static_cast<double>(found) / static_cast<double>(item_.gold.size());
    }
    return Ok{};
  }

  Engine& engine_;
  PromptMaker prompts_;
  const EvalItem& item_;
  const PolicyOptions& policy_;
  PolicyRecord record_;
  std::vector<KvCounters> layers_;
  int64_t prompt_tokens_ = 0, gold_tokens_ = 0;
};

}  // namespace

Result<ItemRecord> run_item(Engine& engine, const EvalItem& item,
                            const std::vector<NamedPolicy>& policies, SolveMode mode) {
  ItemRecord record;
  record.id = item.id();
  record.task = item.task;
  record.metric = metric_name(item.metric);
  record.context = item.context;
  record.index = item.index;
  record.seed = item.seed;
  record.answers = item.answers;
  record.numbers = item.numbers;
  record.labels = item.labels;
  CLO_ASSIGN(const PolicyOptions dense, preset("dense"));
  std::vector<NamedPolicy> all = {{kDenseName, dense}};
  for (const NamedPolicy& policy : policies) {
    if (policy.name != kDenseName) all.push_back(policy);
  }
  for (const NamedPolicy& policy : all) {
    ItemRun run(engine, item, policy.options);
    CLO_ASSIGN(record.results[policy.name], run.run(mode));
    record.prompt_tokens = std::max(record.prompt_tokens, run.prompt_tokens());
    record.gold_tokens = run.gold_tokens();
  }
  return record;
}

}  // namespace clo
