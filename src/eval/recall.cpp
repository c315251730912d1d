#include "eval/recall.h"

#include <algorithm>
#include <set>

#include "base/try.h"
#include "eval/distributions.h"

namespace clo {

namespace {

using LogitRows = std::vector<std::vector<float>>;

struct Run {
  Response response;
  LogitRows logits;
};

Result<Run> ask(Engine& engine, const std::string& prompt, const PolicyOptions& policy,
                const RecallOptions& options, std::vector<int32_t> forced) {
  Run run;
  Request request;
  request.messages = {{"user", prompt}};
  request.policy = policy;
  request.sampling = SamplingOptions{};
  if (forced.empty()) {
    request.max_new_tokens = options.max_new_tokens;
    request.stop = {"\n"};
  } else {
    request.max_new_tokens = std::ssize(forced);
    request.forced_tokens = std::move(forced);
  }
  request.measure_mass = policy.select != Select::kNone;
  request.on_logits = [&](std::span<const float> row) {
    run.logits.emplace_back(row.begin(), row.end());
  };
  CLO_ASSIGN(run.response, engine.generate(std::move(request)));
  if (run.response.error) return *run.response.error;
  return run;
}

void record(const Run& run, const Fact& fact, RecallOutcome& outcome) {
  const Report& report = run.response.report;
  outcome.answer = run.response.text;
  outcome.right = is_right(fact, run.response.text);
  outcome.counters = report.total;
  outcome.decode_steps = report.decode_steps;
  outcome.share_attended = report.share_attended;
  outcome.row_bytes = report.row_bytes;
}

void compare(const Run& forced, const LogitRows& dense, RecallOutcome& outcome) {
  const size_t steps = std::min(forced.logits.size(), dense.size());
  for (size_t i = 0; i < steps; ++i) {
    outcome.agreed_tokens += most_likely(forced.logits[i]) == most_likely(dense[i]);
    outcome.kl_sum += kl_divergence(dense[i], forced.logits[i]);
    ++outcome.compared_tokens;
  }
  const KvCounters& total = forced.response.report.total;
  if (total.mass_samples > 0) {
    outcome.mass_kept = total.mass_kept / static_cast<double>(total.mass_samples);
  }
}

// The facts of one document: consecutive item seeds, with keys that differ.
std::vector<RecallItem> make_items(const RecallOptions& options, int64_t document) {
  std::vector<RecallItem> items;
  std::set<std::string> keys;
  const int64_t first = document * options.facts_per_document;
  const int64_t last =
      std::min(first + options.facts_per_document, options.first_seed + options.items);
  for (int64_t seed = first; seed < last; ++seed) {
    RecallItem item;
    item.seed = seed;
    item.document = document;
    item.licence_text = document % 2 == 1;
    ItemRandom random(static_cast<uint64_t>(seed));
    do {
      item.fact = make_fact(static_cast<FactForm>(seed % 3), random);
    } while (!keys.insert(item.fact.key).second);
    items.push_back(std::move(item));
  }
  return items;
}

Result<std::string> make_document(const Engine& engine, const RecallOptions& options,
                                  const std::vector<RecallItem>& items) {
  const TokenCounter count = [&](std::string_view text) -> Result<int64_t> {
    CLO_ASSIGN(const auto ids, engine.encode(text));
    return std::ssize(ids);
  };
  std::vector<Fact> facts;
  int64_t frame = 0;  // tokens of the chat template round the longest question
  for (const RecallItem& item : items) {
    facts.push_back(item.fact);
    Request question;
    question.messages = {{"user", "\n" + item.fact.question()}};
    CLO_ASSIGN(const auto ids, engine.tokenize(question));
    frame = std::max<int64_t>(frame, std::ssize(ids));
  }
  const auto seed = static_cast<uint64_t>(items.front().document);
  FillerText filler = FillerText::prose(seed);
  if (items.front().licence_text) {
    CLO_ASSIGN(filler, FillerText::licences(seed, options.licence_folder));
  }
  return plant_facts(facts, std::move(filler),
                     options.context_tokens - frame - options.max_new_tokens, options.clear_tokens,
                     count);
}

}  // namespace

Result<std::vector<RecallItem>> run_recall(
    Engine& engine, const RecallOptions& options, const std::vector<NamedPolicy>& policies,
    const std::function<void(const RecallItem&, int64_t done)>& on_item) {
  CLO_ASSIGN(const PolicyOptions dense, preset("dense"));
  std::vector<RecallItem> all;
  for (int64_t document = options.first_seed / options.facts_per_document;
       std::ssize(all) < options.items; ++document) {
    std::vector<RecallItem> items = make_items(options, document);
    CLO_ASSIGN(const std::string text, make_document(engine, options, items));
    for (RecallItem& item : items) {
      const std::string prompt = text + "\n" + item.fact.question();
      CLO_ASSIGN(const Run free, ask(engine, prompt, dense, options, {}));
      record(free, item.fact, item.dense);
      item.prompt_tokens = free.response.report.prompt_tokens;
      for (const NamedPolicy& policy : policies) {
        RecallOutcome& outcome = item.policies.emplace_back();
        CLO_ASSIGN(Run run, ask(engine, prompt, policy.options, options, {}));
        record(run, item.fact, outcome);
        if (free.response.tokens.empty()) continue;
        if (run.response.tokens != free.response.tokens) {
          CLO_ASSIGN(run, ask(engine, prompt, policy.options, options, free.response.tokens));
        }
        compare(run, free.logits, outcome);
      }
      all.push_back(std::move(item));
      if (on_item) on_item(all.back(), std::ssize(all));
    }
    engine.drop_prefixes();
  }
  return all;
}

}  // namespace clo
