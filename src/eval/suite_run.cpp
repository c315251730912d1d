#include "eval/suite_run.h"

#include "base/try.h"
#include "eval/scorers.h"
#include "eval/text_pieces.h"

namespace clo {

namespace {

class ItemRun {
 public:
  ItemRun(Engine& engine, const EvalItem& item, const PolicyOptions& policy, SetWatcher* watcher)
      : engine_(engine), prompts_(engine), item_(item), policy_(policy), watcher_(watcher) {}

  Result<PolicyRecord> run(SolveMode mode) {
    Request request = prompts_.request(item_);
    if (mode == SolveMode::kDirect) {
      CLO_ASSIGN(record_.answer, ask(std::move(request), item_.text));
    } else {
      CLO_ASSIGN(record_.recitation, recite());
      // The evidence stands in the conversation's first turn, or, as the model wrote it, nowhere.
      const bool keep = mode == SolveMode::kKeep;
      const std::string& quoted = record_.recitation->text;
      const std::vector<std::string> turns =
          keep ? std::vector<std::string>{item_.recite, quoted, item_.question}
               : std::vector<std::string>{"These facts are known:\n" + quoted + "\n\n" +
                                          item_.question};
      prompts_.set_turns(item_, turns, request);
      CLO_ASSIGN(record_.answer, ask(std::move(request), keep ? item_.recite : ""));
    }
    if (watcher_ != nullptr) record_.sets = watcher_->take();
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
  int64_t masked_tokens() const { return masked_tokens_; }

 private:
  // `material`: the turn in the prompt that the item's evidence and its masked parts stand in; "":
  // none.
  Result<std::string> ask(Request request, const std::string& material) {
    request.policy = policy_;
    if (!material.empty()) {
      CLO_ASSIGN(const auto gold, prompts_.token_ranges(request, material, item_.gold));
      gold_tokens_ = count(gold);
      request.watched_ranges = gold;
      CLO_ASSIGN(request.masked_ranges,
                 prompts_.token_ranges(request, material, item_.masked, PromptMaker::Edges::kOut));
      if (request.masked_ranges.size() != item_.masked.size()) {
        return Error{ErrorCode::kUnsupported,
                     "expected to find what is to be masked among the prompt's tokens, found " +
                         std::to_string(request.masked_ranges.size()) + " of " +
                         std::to_string(item_.masked.size()) +
                         " parts: the tokenizer changes the text",
                     item_.id()};
      }
      masked_tokens_ = count(request.masked_ranges);
    }
    request.measure_mass = true;
    if (watcher_ != nullptr) watcher_->begin();
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

  static int64_t count(const std::vector<TokenRange>& ranges) {
    int64_t tokens = 0;
    for (const TokenRange& range : ranges) tokens += range.end - range.first;
    return tokens;
  }

  Result<Recitation> recite() {
    Request request = prompts_.request(item_);
    prompts_.set_turns(item_, {item_.recite}, request);
    request.answer_prefix.clear();
    request.stop.clear();
    request.max_new_tokens = kReciteTokens;
    CLO_ASSIGN(const std::string text, ask(std::move(request), item_.recite));
    std::vector<std::string> evidence;
    for (const TextSpan& span : item_.gold) {
      evidence.push_back(item_.text.substr(span.begin, span.end - span.begin));
    }
    return score_recitation(engine_, std::string(trimmed(text)), evidence);
  }

  Engine& engine_;
  PromptMaker prompts_;
  const EvalItem& item_;
  const PolicyOptions& policy_;
  SetWatcher* watcher_;
  PolicyRecord record_;
  std::vector<KvCounters> layers_;
  int64_t prompt_tokens_ = 0, gold_tokens_ = 0, masked_tokens_ = 0;
};

// With a space before each word: line ends are no difference, and a word at the beginning has the
// tokens that it has further on.
std::string even(std::string_view text) {
  std::string out;
  for (const std::string& word : split_words(text)) out += " " + word;
  return out;
}

}  // namespace

Result<Recitation> score_recitation(const Engine& engine, const std::string& text,
                                    const std::vector<std::string>& evidence) {
  const auto add_tokens = [&](const std::string& piece, std::vector<std::string>& out) -> Status {
    CLO_ASSIGN(const auto ids, engine.encode(piece));
    for (const int32_t id : ids) out.push_back(engine.token_bytes(id));
    return Ok{};
  };
  Recitation recitation;
  recitation.text = text;
  const std::string quoted = even(text);
  std::vector<std::string> tokens, evidence_tokens;
  CLO_TRY(add_tokens(quoted, tokens));
  size_t found = 0;
  for (const std::string& sentence : evidence) {
    CLO_TRY(add_tokens(even(sentence), evidence_tokens));
    found += (quoted + " ").find(even(sentence) + " ") != std::string::npos;
  }
  recitation.tokens = lcs_recall(tokens, evidence_tokens);
  if (!evidence.empty()) {
    recitation.sentences = static_cast<double>(found) / static_cast<double>(evidence.size());
  }
  recitation.exact = !evidence.empty() && found == evidence.size();
  return recitation;
}

Result<ItemRecord> run_item(Engine& engine, const EvalItem& item,
                            const std::vector<NamedPolicy>& policies, SolveMode mode,
                            SetWatcher* watcher) {
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
    ItemRun run(engine, item, policy.options, watcher);
    CLO_ASSIGN(record.results[policy.name], run.run(mode));
    record.prompt_tokens = std::max(record.prompt_tokens, run.prompt_tokens());
    record.gold_tokens = run.gold_tokens();
    record.masked_tokens = run.masked_tokens();
  }
  return record;
}

}  // namespace clo
