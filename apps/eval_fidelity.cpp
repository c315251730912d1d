// clo eval fidelity: what a policy, a kind of weights or a type of rows changes in the next token's
// distribution, on any text.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/units.h"
#include "engine/backend.h"
#include "engine/memory.h"
#include "eval/fidelity.h"
#include "eval_commands.h"
#include "flags.h"
#include "io/model_files.h"
#include "policy_lists.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct FidelityFlags {
  EngineFlags engine;
  PolicyLists policies;
  std::vector<std::string> texts;
  std::string weights, kv_types, reference = "bf16";
  int64_t context = 4096, compared = 512;
  std::optional<int64_t> windows;
  std::string output;
  bool all_windows = false, quiet = false;
};

double ratio(double part, double whole) { return whole == 0 ? 0 : part / whole; }

// What a run's engine holds: a name of weights and one of rows.
struct Kind {
  std::string weights, kv_type;
};

// What these names become in memory: two of them can mean the same.
struct Memory {
  WeightPlan weights;
  DType rows = DType::kBF16;
  RowFormat stored = RowFormat::kFull;

  bool operator==(const Memory&) const = default;
};

nlohmann::json outcome_json(const std::string& name, const std::string& weights,
                            const PolicyOptions& policy, const FidelityOutcome& o,
                            const FidelityOutcome& reference) {
  const KvCounters& c = o.counters;
  const auto tokens = static_cast<double>(o.tokens);
  const auto steps = static_cast<double>(o.decode_steps);
  nlohmann::json line = {
      {"kind", "summary"},
      {"suite", "fidelity"},
      {"policy", name},
      {"weights", weights},
      {"kv_type", o.kv_type},
      {"row_bytes", o.row_bytes},
      {"full_row_bytes", o.full_row_bytes},
      {"flags", describe(policy)},
      {"kv_ratio", policy.select == Select::kNone ? 1 : policy.kv_ratio},
      {"set_tokens", policy.set_tokens},
      {"tokens", o.tokens},
      {"perplexity", o.perplexity()},
      {"perplexity_ratio", ratio(o.perplexity(), reference.perplexity())},
      {"next_token_agreement", ratio(static_cast<double>(o.agreed), tokens)},
      {"kl_nats", ratio(o.kl_sum, tokens)},
      {"kl_nats_max", o.kl_max},
      {"mass_kept", c.mean_mass_kept()},
      {"hit_rate", c.hit_rate()},
      {"new_rows_on_a_miss",
       ratio(static_cast<double>(c.rows_fetched), static_cast<double>(c.rows_requested))},
      {"share_attended", c.rows_in_context == 0 ? 1
                                                : ratio(static_cast<double>(c.rows_attended),
                                                        static_cast<double>(c.rows_in_context))},
      {"bytes_attended_per_token",
       ratio(static_cast<double>(c.bytes_attended(o.row_bytes, o.full_row_bytes)), steps)},
      {"bytes_fetched_per_token", ratio(static_cast<double>(c.rows_fetched * o.row_bytes), steps)}};
  if (c.kept_sets > 0) {
    line["hidden_changes"] =
        ratio(static_cast<double>(c.hidden_changes), static_cast<double>(c.kept_sets));
  }
  if (const QualityReport q = o.mean_quality(); q.samples > 0) {
    line["quality"] = {{"wanted", q.wanted}, {"estimated", q.estimated}, {"low", q.low},
                       {"high", q.high},     {"samples", q.samples},     {"set_scale", q.set_scale},
                       {"angle", q.angle}};
  }
  if (c.query_cosine_samples > 0) {  // the CPU backend alone measures it
    line["query_cosine"] = c.mean_query_cosine();
    for (const KvCounters& layer : o.layers) {
      line["query_cosine_by_layer"].push_back(layer.mean_query_cosine());
    }
  }
  return line;
}

void print_row(const nlohmann::json& line) {
  const auto number = [&](const char* key) { return line.at(key).get<double>(); };
  const bool has_cosine = line.contains("query_cosine");
  char cosine[16] = "-";
  if (has_cosine) std::snprintf(cosine, sizeof cosine, "%.4f", number("query_cosine"));
  std::printf("%-8s %-5s %-22s %10.4f %8.4f %6.1f%% %9.5f %6.3f %6s %6.1f%% %6.1f%% %6.1f%% %10s\n",
              line.at("weights").get<std::string>().c_str(),
              line.at("kv_type").get<std::string>().c_str(),
              line.at("policy").get<std::string>().c_str(), number("perplexity"),
              number("perplexity_ratio"), 100 * number("next_token_agreement"), number("kl_nats"),
              number("mass_kept"), cosine, 100 * number("share_attended"), 100 * number("hit_rate"),
              100 * number("new_rows_on_a_miss"),
              format_bytes(static_cast<int64_t>(number("bytes_fetched_per_token"))).c_str());
  if (line.contains("quality")) {
    const auto& q = line.at("quality");
    std::printf(
        "%15smass %.2f %% wanted, %.2f %% by %ld samples (%.2f to %.2f); sets x %.2f, angle x "
        "%.2f\n",
        "", 100 * q.at("wanted").get<double>(), 100 * q.at("estimated").get<double>(),
        q.at("samples").get<long>(), 100 * q.at("low").get<double>(),
        100 * q.at("high").get<double>(), q.at("set_scale").get<double>(),
        q.at("angle").get<double>());
  }
  std::fflush(stdout);
}

Result<int> fidelity(const FidelityFlags& flags) {
  CLO_TRY(in_range("--context", flags.context, 2, int64_t{1} << 24));
  CLO_TRY(in_range("--compared", flags.compared, 1, flags.context - 1));
  CLO_TRY(in_range("--windows", flags.windows.value_or(1), 1, 1'000'000));
  if (flags.windows && flags.all_windows) {
    return Error{ErrorCode::kBadFlag, "contradict each other: drop one",
                 "--windows and --all-windows"};
  }
  const FidelityOptions suite = {flags.context, flags.compared,
                                 flags.all_windows ? 0 : flags.windows.value_or(1)};
  const auto contradiction = [](const char* flags_of_both) {
    return Error{ErrorCode::kBadFlag, "contradict each other: the list says which to run; drop one",
                 flags_of_both};
  };
  if (!flags.weights.empty() && flags.engine.weights != "auto") {
    return contradiction("--weights-list and --weights");
  }
  if (!flags.kv_types.empty() && flags.engine.kv_type != "auto") {
    return contradiction("--kv-type-list and --kv-type");
  }
  CLO_ASSIGN(const std::vector<NamedPolicy> policies, flags.policies.resolve());
  if (!flags.output.empty()) CLO_TRY(check_writable(flags.output));
  std::string text;
  for (const std::string& path : flags.texts) {
    CLO_ASSIGN(const std::string more, read_text(path));
    text += more;
  }
  CLO_ASSIGN(const PolicyOptions dense, preset("dense"));
  std::vector<PolicyOptions> all = {dense};
  for (const NamedPolicy& policy : policies) all.push_back(policy.options);

  const auto options_of = [&](const Kind& kind) -> Result<EngineOptions> {
    EngineFlags engine_flags = flags.engine;
    engine_flags.weights = kind.weights;
    engine_flags.kv_type = kind.kv_type;
    return engine_flags.resolve();
  };
  const auto load = [&](const Kind& kind) -> Result<std::unique_ptr<Engine>> {
    CLO_ASSIGN(EngineOptions options, options_of(kind));
    options.max_context_tokens = flags.context;
    options.max_batch = static_cast<int32_t>(policies.size()) + 1;
    options.policy = widest(all);
    return Engine::load(options);
  };
  const auto memory_of = [&](const Kind& kind) -> Result<Memory> {
    CLO_ASSIGN(EngineOptions options, options_of(kind));
    CLO_ASSIGN(const ModelFiles model, ModelFiles::find(options.model_dir));
    CLO_ASSIGN(const ModelConfig config, model.config());
    CLO_ASSIGN(const BackendChoice choice, choose_backend(config, options));
    options.backend = choice.backend;
    CLO_ASSIGN(WeightPlan plan, weight_plan(config, options));
    const KvShape shape = kv_shape(config, options);
    return Memory{std::move(plan), shape.type, shape.stored};
  };
  const auto list_or = [](const std::string& list, const std::string& one) {
    return list.empty() ? std::vector<std::string>{one} : split_list(list);
  };
  std::vector<Kind> kinds;
  for (const std::string& weights : list_or(flags.weights, flags.engine.weights)) {
    for (const std::string& kv_type : list_or(flags.kv_types, flags.engine.kv_type)) {
      kinds.push_back({weights, kv_type});
    }
  }
  const Kind reference_kind = {flags.reference, "auto"};
  CLO_ASSIGN(const Memory reference_memory, memory_of(reference_kind));
  CLO_ASSIGN(const std::unique_ptr<Engine> reference, load(reference_kind));
  if (flags.context > reference->max_context_tokens()) {
    return Error{ErrorCode::kBadFlag,
                 "expected at most " + std::to_string(reference->max_context_tokens()) +
                     ", the model's limit, found " + std::to_string(flags.context),
                 "--context"};
  }
  CLO_ASSIGN(const std::vector<int32_t> ids, reference->encode(text));

  std::string lines = nlohmann::json{{"kind", "run"},
                                     {"suite", "fidelity"},
                                     {"commit", commit_name()},
                                     {"version", version()},
                                     {"command", command_line()},
                                     {"machine", machine_name()},
                                     {"model", flags.engine.model},
                                     {"text_tokens", ids.size()},
                                     {"context", flags.context},
                                     {"compared", flags.compared},
                                     {"windows", num_windows(std::ssize(ids), suite)},
                                     {"reference_weights", flags.reference}}
                          .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
                      "\n";
  for (size_t k = 0; k < kinds.size(); ++k) {
    // One engine at a time beside the reference; the same one where weights and rows are the same.
    std::unique_ptr<Engine> own;
    Engine* engine = reference.get();
    CLO_ASSIGN(const Memory memory, memory_of(kinds[k]));
    if (memory != reference_memory) {
      CLO_ASSIGN(own, load(kinds[k]));
      engine = own.get();
    }
    std::vector<FidelityRun> runs = {{"dense", reference.get(), dense}};
    for (const NamedPolicy& policy : policies) {
      const bool same = engine == reference.get() && policy.options.select == Select::kNone;
      if (!same) runs.push_back({policy.name, engine, policy.options});
    }
    ProgressLine progress(!flags.quiet);
    auto outcomes = run_fidelity(ids, suite, runs, [&](int64_t done, int64_t total) {
      progress.items("weights " + kinds[k].weights + ", kv " + kinds[k].kv_type, done, total);
    });
    progress.clear();
    if (!outcomes) return std::move(outcomes).error();
    if (k == 0) {
      std::printf("%-8s %-5s %-22s %10s %8s %7s %9s %6s %6s %7s %7s %7s %10s\n", "weights", "kv",
                  "policy", "perplexity", "ratio", "agree", "KL", "mass", "cosine", "read", "hits",
                  "new", "bytes/tok");
    }
    for (size_t r = 0; r < runs.size(); ++r) {
      if (r == 0 && k > 0) continue;  // printed already
      const nlohmann::json line =
          outcome_json(runs[r].name, r == 0 ? flags.reference : kinds[k].weights, runs[r].policy,
                       (*outcomes)[r], outcomes->front());
      print_row(line);
      lines += line.dump() + "\n";
    }
  }
  if (!flags.output.empty()) CLO_TRY(write_whole(flags.output, lines));
  return 0;
}

}  // namespace

Command add_eval_fidelity(CLI::App& app) {
  CLI::App* sub = app.add_subcommand(
      "fidelity", "The next token's distribution at every token of a text, against dense");
  auto flags = std::make_shared<FidelityFlags>();
  FidelityFlags& f = *flags;
  f.engine.add_to(*sub, false);
  sub->add_option("--text", f.texts, "Text files, one after another")->required();
  add_value(*sub, "--context", f.context, "Tokens of a window of the text (4096)");
  add_value(*sub, "--compared", f.compared, "The last ones of a window, which are compared (512)");
  add_value(*sub, "--windows", f.windows, "Windows, one after another (1)");
  sub->add_flag("--all-windows", f.all_windows,
                "As many as the text has, the last one as short as what is left");
  sub->add_option("--weights-list", f.weights, "Several --weights, such as bf16,int8,q4");
  sub->add_option("--kv-type-list", f.kv_types, "Several --kv-type, such as auto,int8,fp8");
  sub->add_option("--reference-weights", f.reference,
                  "Weights of the dense reference (bf16); its rows are never compressed");
  sub->add_option("-o,--output", f.output, "Write every row as JSON lines");
  sub->add_flag("--quiet", f.quiet, "No progress line");
  f.policies.add_to(*sub);
  sub->footer(
      "Every token of the text is forced, so nothing is generated. Columns: perplexity and its "
      "ratio to the reference's;\nhow often the most likely next token is the same; KL(reference "
      "|| this) in nats; attention mass kept; cosine of a\nquery with the step's before, mean over "
      "heads and layers; rows read of those in context; hit rate; share of new\nrows on a miss; "
      "bytes fetched per token. With --all-windows --context 4096\n"
      "--compared 4095 every token of a text is compared but the first of each window.");
  return [flags] { return fidelity(*flags); };
}

}  // namespace clo::app
