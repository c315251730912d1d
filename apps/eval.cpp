// clo eval recall: what a policy costs in answers, against dense on the same items.
#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/units.h"
#include "commands.h"
#include "eval/paired.h"
#include "eval/recall.h"
#include "eval_commands.h"
#include "flags.h"
#include "policy_lists.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct RecallFlags {
  EngineFlags engine;
  PolicyLists policies;
  std::string contexts = "4096";
  std::string against = "dense";
  std::string output;
  int64_t items = 100;
  int64_t first_seed = 0;
  std::string licence_folder = kLicenceFolder;
  int64_t facts_per_document = 6;
  bool quiet = false;
};

struct Summary {
  PairedCounts numbers_and_words, codes;
  int64_t compared = 0, agreed = 0;
  double kl = 0, mass = 0, attended = 0;
  int64_t mass_items = 0, items = 0, steps = 0, row_bytes = 0;
  KvCounters counters;

  void add(const RecallItem& item, const RecallOutcome& outcome) {
    auto& counts = item.fact.form == FactForm::kCode ? codes : numbers_and_words;
    counts.add(item.dense.right, outcome.right);
    compared += outcome.compared_tokens;
    agreed += outcome.agreed_tokens;
    kl += outcome.kl_sum;
    if (outcome.mass_kept > 0) {
      mass += outcome.mass_kept;
      ++mass_items;
    }
    attended += outcome.share_attended;
    ++items;
    steps += outcome.decode_steps;
    counters += outcome.counters;
    row_bytes = outcome.row_bytes;
  }
  static double ratio(double part, double whole) { return whole == 0 ? 0 : part / whole; }
  double hit_rate() const { return counters.hit_rate(); }
  double new_share() const {
    return ratio(static_cast<double>(counters.rows_fetched),
                 static_cast<double>(counters.rows_requested));
  }
  double bytes_per_token() const {
    return ratio(static_cast<double>(counters.rows_fetched * row_bytes),
                 static_cast<double>(steps));
  }
  double mean_mass() const { return ratio(mass, static_cast<double>(mass_items)); }
};

nlohmann::json paired_json(const PairedCounts& counts) {
  const Interval interval = paired_difference(counts);
  return {
      {"items", counts.items},
      {"dense_right", counts.first_right()},
      {"right", counts.second_right()},
      {"lost", counts.lost},
      {"gained", counts.gained},
      {"difference_points", Summary::ratio(100.0 * static_cast<double>(counts.gained - counts.lost),
                                           static_cast<double>(counts.items))},
      {"interval_95", {interval.low, interval.high}}};
}

nlohmann::json item_json(int64_t context, const RecallItem& item,
                         const std::vector<NamedPolicy>& policies) {
  nlohmann::json json = {{"kind", "item"},
                         {"context", context},
                         {"seed", item.seed},
                         {"document", item.document},
                         {"filler", item.licence_text ? "licences" : "prose"},
                         {"prompt_tokens", item.prompt_tokens},
                         {"form", fact_form_name(item.fact.form)},
                         {"key", item.fact.key},
                         {"value", item.fact.value},
                         {"depth", item.fact.depth},
                         {"dense", {{"right", item.dense.right}, {"answer", item.dense.answer}}}};
  for (size_t p = 0; p < policies.size(); ++p) {
    const RecallOutcome& outcome = item.policies[p];
    const KvCounters& c = outcome.counters;
    json["policies"][policies[p].name] = {{"right", outcome.right},
                                          {"answer", outcome.answer},
                                          {"agreed", outcome.agreed_tokens},
                                          {"compared", outcome.compared_tokens},
                                          {"kl_sum", outcome.kl_sum},
                                          {"mass_kept", outcome.mass_kept},
                                          {"hits", c.hits},
                                          {"misses", c.misses + c.aged + c.incomplete},
                                          {"rows_requested", c.rows_requested},
                                          {"rows_fetched", c.rows_fetched},
                                          {"row_bytes", outcome.row_bytes},
                                          {"steps", outcome.decode_steps},
                                          {"share_attended", outcome.share_attended}};
  }
  return json;
}

nlohmann::json summary_json(int64_t context, const NamedPolicy& policy, const Summary& s) {
  return {{"kind", "summary"},
          {"suite", "recall"},
          {"context", context},
          {"policy", policy.name},
          {"flags", describe(policy.options)},
          {"numbers_and_words", paired_json(s.numbers_and_words)},
          {"codes", paired_json(s.codes)},
          {"next_token_agreement",
           Summary::ratio(static_cast<double>(s.agreed), static_cast<double>(s.compared))},
          {"kl_nats", Summary::ratio(s.kl, static_cast<double>(s.compared))},
          {"mass_kept", s.mean_mass()},
          {"hit_rate", s.hit_rate()},
          {"new_rows_on_a_miss", s.new_share()},
          {"bytes_fetched_per_token", s.bytes_per_token()},
          {"share_attended", Summary::ratio(s.attended, static_cast<double>(s.items))}};
}

void print_header() {
  std::printf("%8s  %-22s %-14s %5s %5s  %-16s %-9s %6s %8s %6s %6s %6s %10s\n", "context",
              "policy", "right/dense/n", "lost", "won", "difference 95 %", "codes", "agree", "KL",
              "mass", "hits", "new", "bytes/tok");
}

void print_row(int64_t context, const NamedPolicy& policy, const Summary& s) {
  const PairedCounts& c = s.numbers_and_words;
  const Interval interval = paired_difference(c);
  char right[64], range[64], codes[64];
  std::snprintf(right, sizeof right, "%ld/%ld/%ld", static_cast<long>(c.second_right()),
                static_cast<long>(c.first_right()), static_cast<long>(c.items));
  std::snprintf(range, sizeof range, "%+.1f to %+.1f", interval.low, interval.high);
  std::snprintf(codes, sizeof codes, "%ld/%ld/%ld", static_cast<long>(s.codes.second_right()),
                static_cast<long>(s.codes.first_right()), static_cast<long>(s.codes.items));
  std::printf("%8ld  %-22s %-14s %5ld %5ld  %-16s %-9s %5.1f%% %8.4f %6.3f %5.1f%% %5.1f%% %10s\n",
              static_cast<long>(context), policy.name.c_str(), right, static_cast<long>(c.lost),
              static_cast<long>(c.gained), range, codes,
              100 * Summary::ratio(static_cast<double>(s.agreed), static_cast<double>(s.compared)),
              Summary::ratio(s.kl, static_cast<double>(s.compared)), s.mean_mass(),
              100 * s.hit_rate(), 100 * s.new_share(),
              format_bytes(static_cast<int64_t>(s.bytes_per_token())).c_str());
  std::fflush(stdout);
}

Result<int> recall(const RecallFlags& flags) {
  if (flags.against != "dense") {
    return Error{ErrorCode::kBadFlag, "expected dense, found \"" + flags.against + "\"",
                 "--against"};
  }
  if (flags.items < 1 || flags.items > 1'000'000) {
    return Error{ErrorCode::kBadFlag, "expected 1 to 1000000, found " + std::to_string(flags.items),
                 "--items"};
  }
  if (flags.facts_per_document < 1 || flags.facts_per_document > 64) {
    return Error{ErrorCode::kBadFlag,
                 "expected 1 to 64, found " + std::to_string(flags.facts_per_document),
                 "--facts-per-document"};
  }
  if (flags.first_seed < 0 || flags.first_seed % flags.facts_per_document != 0) {
    return Error{ErrorCode::kBadFlag,
                 "expected a multiple of --facts-per-document (a document is run whole), found " +
                     std::to_string(flags.first_seed),
                 "--first-seed"};
  }
  CLO_ASSIGN(const std::vector<int64_t> contexts, parse_numbers(flags.contexts, "--context"));
  CLO_ASSIGN(const std::vector<NamedPolicy> policies, flags.policies.resolve());
  CLO_ASSIGN(EngineOptions options, flags.engine.resolve());
  options.max_batch = 1;
  std::vector<PolicyOptions> all;
  for (const NamedPolicy& policy : policies) all.push_back(policy.options);
  options.policy = widest(all);
  if (!flags.output.empty()) CLO_TRY(check_writable(flags.output));
  CLO_ASSIGN(const std::unique_ptr<Engine> engine, Engine::load(options));
  for (const int64_t context : contexts) {
    if (context > engine->max_context_tokens()) {
      return Error{ErrorCode::kBadFlag,
                   "expected at most " + std::to_string(engine->max_context_tokens()) +
                       ", the model's limit, found " + std::to_string(context),
                   "--context"};
    }
  }
  nlohmann::json head = {{"kind", "run"},
                         {"commit", commit_name()},
                         {"version", version()},
                         {"command", command_line()},
                         {"machine", machine_name()},
                         {"model", flags.engine.model},
                         {"kv_type", flags.engine.kv_type},
                         {"items", flags.items},
                         {"first_seed", flags.first_seed},
                         {"facts_per_document", flags.facts_per_document}};
  std::string lines;
  std::vector<Summary> totals(policies.size());
  for (const int64_t context : contexts) {
    RecallOptions recall_options;
    recall_options.context_tokens = context;
    recall_options.items = flags.items;
    recall_options.first_seed = flags.first_seed;
    recall_options.licence_folder = flags.licence_folder;
    recall_options.facts_per_document = flags.facts_per_document;
    ProgressLine progress(!flags.quiet);
    std::vector<Summary> summaries(policies.size());
    auto items =
        run_recall(*engine, recall_options, policies, [&](const RecallItem& item, int64_t done) {
          progress.items("context " + std::to_string(context), done, flags.items);
          for (size_t p = 0; p < policies.size(); ++p) {
            summaries[p].add(item, item.policies[p]);
            totals[p].add(item, item.policies[p]);
          }
        });
    progress.clear();
    if (!items) {
      Error error = std::move(items).error();
      if (error.where.empty()) error.where = "context " + std::to_string(context);
      return error;
    }
    if (context == contexts.front()) print_header();
    for (const RecallItem& item : *items) lines += item_json(context, item, policies).dump() + "\n";
    for (size_t p = 0; p < policies.size(); ++p) {
      print_row(context, policies[p], summaries[p]);
      lines += summary_json(context, policies[p], summaries[p]).dump() + "\n";
    }
  }
  if (contexts.size() > 1) {
    for (size_t p = 0; p < policies.size(); ++p) {
      print_row(0, policies[p], totals[p]);
      lines += summary_json(0, policies[p], totals[p]).dump() + "\n";
    }
    std::printf("context 0: all contexts together\n");
  }
  if (!flags.output.empty())
    CLO_TRY(write_whole(
        flags.output,
        head.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n" + lines));
  return 0;
}

}  // namespace

Command add_eval(CLI::App& app) {
  app.require_subcommand(1);
  const Command fidelity = add_eval_fidelity(app);
  const auto suites = add_eval_suites(app);
  CLI::App* sub = app.add_subcommand(
      "recall", "Facts planted in long documents and asked for, under each policy and densely");
  auto flags = std::make_shared<RecallFlags>();
  RecallFlags& f = *flags;
  f.engine.add_to(*sub, false);
  sub->add_option("--context", f.contexts, "Context lengths, such as 4096,16384,32768 (4096)");
  add_value(*sub, "--items", f.items, "Facts per context length: seeds 0 to N-1 (100)");
  add_value(*sub, "--first-seed", f.first_seed, "First seed (0): cuts a long run into several");
  sub->add_option("--licences", f.licence_folder,
                  "Folder of licence texts (/usr/share/common-licenses)");
  add_value(*sub, "--facts-per-document", f.facts_per_document,
            "Facts that share one document and its prefill (6)");
  sub->add_option("--against", f.against, "What answers are compared with: dense");
  sub->add_option("-o,--output", f.output, "Write every item and summary as JSON lines");
  sub->add_flag("--quiet", f.quiet, "No progress line");
  f.policies.add_to(*sub);
  sub->footer(
      "Half the documents are generated prose, half licence texts. A third of the facts are "
      "numbers, "
      "a third words,\na third hexadecimal codes, which are reported apart. Columns: right under "
      "the "
      "policy / dense / items (numbers and\nwords); lost and won against dense on the same items; "
      "codes likewise; agreement and KL (nats) of the next token,\nteacher-forced on the dense "
      "answer; "
      "attention mass kept; hit rate; share of new rows on a miss; bytes fetched.");
  return [flags, sub, fidelity, suites]() -> Result<int> {
    if (sub->parsed()) return recall(*flags);
    for (const auto& [command, run] : suites) {
      if (command->parsed()) return run();
    }
    return fidelity();
  };
}

}  // namespace clo::app
