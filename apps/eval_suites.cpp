// clo eval SUITE: generated items of published benchmarks, under each policy and densely.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/try.h"
#include "eval/html_report.h"
#include "eval/longbench_data.h"
#include "eval/suites.h"
#include "eval_commands.h"
#include "flags.h"
#include "policy_lists.h"
#include "result_log.h"
#include "suite_table.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct SuiteFlags {
  EngineFlags engine;
  PolicyLists policies;
  std::vector<std::string> data;
  std::string contexts = "4096", tasks, against = "dense", output, html, item, filler, solve;
  std::optional<int64_t> items;
  int64_t depths = 11;
  uint64_t seed = 0;
  bool measure_sets = false;
  bool quiet = false;
};

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

Error bad_flag(const std::string& flag, const std::string& expected, const std::string& found) {
  return Error{ErrorCode::kBadFlag, "expected " + expected + ", found \"" + found + "\"", flag};
}

// The tasks that flags ask for, in the suite's order. Fails: kBadFlag.
Result<std::vector<std::string>> chosen_tasks(const Suite& suite, const SuiteFlags& flags) {
  std::vector<std::string> tasks = suite.tasks;
  if (!flags.tasks.empty()) {
    const std::vector<std::string> named = split_list(flags.tasks);
    for (const std::string& name : named) {
      if (std::find(tasks.begin(), tasks.end(), name) == tasks.end()) {
        return bad_flag("--tasks", "some of " + list_of(tasks), name);
      }
    }
    std::erase_if(tasks, [&](const std::string& task) {
      return std::find(named.begin(), named.end(), task) == named.end();
    });
  }
  if (flags.filler.empty()) return tasks;
  std::set<std::string> fillers;
  for (const std::string& name : split_list(flags.filler)) {
    if (name != "none" && name != "prose" && name != "whitespace" && name != "masked") {
      return bad_flag("--filler", "some of none, prose, whitespace, masked", name);
    }
    fillers.insert(name);
  }
  std::erase_if(tasks, [&](const std::string& task) {
    return !fillers.contains(task.substr(0, task.find('_')));
  });
  if (tasks.empty()) {
    return Error{ErrorCode::kBadFlag, "no task has both", "--tasks and --filler"};
  }
  return tasks;
}

Result<SolveMode> solve_mode(const SuiteFlags& flags) {
  if (flags.solve.empty()) return SolveMode::kDirect;
  if (flags.solve == "fresh") return SolveMode::kFresh;
  if (flags.solve == "keep") return SolveMode::kKeep;
  return bad_flag("--retrieve-then-solve", "fresh or keep", flags.solve);
}

Status check_numbers(const SuiteFlags& flags) {
  if (flags.against != "dense") return bad_flag("--against", "dense", flags.against);
  if (flags.items && (*flags.items < 1 || *flags.items > 1'000'000)) {
    return bad_flag("--items", "1 to 1000000", std::to_string(*flags.items));
  }
  if (flags.depths < 1 || flags.depths > 1000) {
    return bad_flag("--depths", "1 to 1000", std::to_string(flags.depths));
  }
  return Ok{};
}

// Every item of the run, by context, task and index; or the one that --item names.
Result<std::vector<SuiteRequest>> plan_items(const Suite& suite, const SuiteFlags& flags,
                                             const std::vector<std::string>& tasks,
                                             const std::vector<int64_t>& contexts) {
  std::vector<SuiteRequest> requests;
  for (const int64_t context : contexts) {
    for (const std::string& task : tasks) {
      SuiteRequest request;
      request.suite = suite.name;
      request.task = task;
      request.context = context;
      request.seed = flags.seed;
      request.items = flags.items.value_or(suite.default_items);
      request.depths = flags.depths;
      const int64_t count = suite.num_items(task, request.items, flags.depths);
      for (request.index = 0; request.index < count; ++request.index) requests.push_back(request);
    }
  }
  if (flags.item.empty()) return requests;
  std::erase_if(requests,
                [&](const SuiteRequest& request) { return request.start().id() != flags.item; });
  if (!requests.empty()) return requests;
  return bad_flag("--item",
                  "an item of this run, such as " + std::string(suite.name) + "/" + tasks.front() +
                      "/" + std::to_string(contexts.front()) + "/0",
                  flags.item);
}

// The first line of a result file. All that an item's line depends on is in its identity.
nlohmann::ordered_json run_line(const Suite& suite, const SuiteFlags& flags,
                                const std::vector<SuiteRequest>& requests,
                                const std::vector<NamedPolicy>& policies) {
  std::vector<std::string> tasks;
  std::vector<int64_t> contexts;
  for (const SuiteRequest& request : requests) {
    if (std::find(tasks.begin(), tasks.end(), request.task) == tasks.end()) {
      tasks.push_back(request.task);
    }
    if (contexts.empty() || contexts.back() != request.context) contexts.push_back(request.context);
  }
  const EngineFlags& engine = flags.engine;
  nlohmann::ordered_json identity = {{"suite", suite.name},
                                     {"model", engine.model},
                                     {"tasks", tasks},
                                     {"contexts", contexts},
                                     {"items", requests.front().items},
                                     {"item", flags.item},
                                     {"depths", flags.depths},
                                     {"seed", flags.seed},
                                     {"data", flags.data},
                                     {"retrieve_then_solve", flags.solve},
                                     {"measure_sets", flags.measure_sets},
                                     {"backend", engine.backend},
                                     {"weights", engine.weights},
                                     {"dtype", engine.dtype},
                                     {"kv_type", engine.kv_type},
                                     {"profile", engine.profile},
                                     {"bits", engine.bits.value_or(-1)},
                                     {"device_memory", engine.device_memory.value_or("")}};
  for (const NamedPolicy& policy : policies) {
    identity["policies"][policy.name] = describe(policy.options);
  }
  return {{"kind", "run"},        {"suite", suite.name},       {"commit", commit_name()},
          {"version", version()}, {"command", command_line()}, {"machine", machine_name()},
          {"identity", identity}};
}

// Fails: kBadFlag for lengths that repeat or that the model has not.
Status check_contexts(const std::vector<int64_t>& contexts, int64_t limit) {
  for (size_t i = 0; i < contexts.size(); ++i) {
    if (std::find(contexts.begin(), contexts.begin() + static_cast<std::ptrdiff_t>(i),
                  contexts[i]) != contexts.begin() + static_cast<std::ptrdiff_t>(i)) {
      return bad_flag("--context", "different lengths", std::to_string(contexts[i]) + " twice");
    }
    if (contexts[i] > limit) {
      return Error{ErrorCode::kBadFlag,
                   "expected at most " + std::to_string(limit) + ", the model's limit, found " +
                       std::to_string(contexts[i]),
                   "--context"};
    }
  }
  return Ok{};
}

// Fails: kUnsupported for masked filler on a backend that masks no tokens.
Status check_masks(const Engine& engine, const std::vector<std::string>& tasks) {
  const bool wanted = std::any_of(tasks.begin(), tasks.end(), [](const std::string& task) {
    return task.starts_with("masked");
  });
  if (!wanted || engine.can_mask()) return Ok{};
  return Error{ErrorCode::kUnsupported,
               "tokens are masked on the CPU backend only; use --backend cpu, or --filler "
               "none,prose,whitespace",
               "--filler masked"};
}

// Rows can be looked at on the CPU backend alone, which is then the one that is chosen. Fails:
// kUnsupported where another was asked for.
Status watch(EngineOptions& options, SetWatcher& watcher) {
  if (options.backend == Backend::kCuda) {
    return Error{ErrorCode::kUnsupported,
                 "sets are looked at on the CPU backend only; leave one of the two out",
                 "--measure-sets and --backend cuda"};
  }
  options.backend = Backend::kCpu;
  options.observer = &watcher;
  return Ok{};
}

Result<int> run_suite(const Suite& generated, const SuiteFlags& flags) {
  CLO_TRY(check_numbers(flags));
  Suite suite = generated;
  if (!flags.data.empty()) {
    CLO_ASSIGN(suite, load_longbench(flags.data));
  }
  CLO_ASSIGN(const std::vector<std::string> tasks, chosen_tasks(suite, flags));
  CLO_ASSIGN(const SolveMode mode, solve_mode(flags));
  CLO_ASSIGN(const std::vector<int64_t> contexts, parse_numbers(flags.contexts, "--context"));
  CLO_ASSIGN(const std::vector<NamedPolicy> policies, flags.policies.resolve());
  CLO_ASSIGN(std::vector<SuiteRequest> requests, plan_items(suite, flags, tasks, contexts));
  CLO_ASSIGN(EngineOptions options, flags.engine.resolve());
  options.max_batch = 1;
  SetWatcher watcher;
  if (flags.measure_sets) CLO_TRY(watch(options, watcher));
  std::vector<PolicyOptions> all;
  for (const NamedPolicy& policy : policies) all.push_back(policy.options);
  options.policy = widest(all);
  for (const std::string& path : {flags.output, flags.html}) {
    if (!path.empty()) CLO_TRY(check_writable(path));
  }
  CLO_ASSIGN(const std::unique_ptr<Engine> engine, Engine::load(options));
  CLO_TRY(check_contexts(contexts, engine->max_context_tokens()));
  if (suite.name == "length") CLO_TRY(check_masks(*engine, tasks));
  std::vector<std::string> names = {kDenseName};
  for (const NamedPolicy& policy : policies) {
    if (policy.name != kDenseName) names.push_back(policy.name);
  }
  ResultLog log;
  std::vector<ItemRecord> records;
  CLO_TRY(log.open(flags.output, run_line(suite, flags, requests, policies), records));
  std::set<std::string> finished;
  for (const ItemRecord& record : records) finished.insert(record.id);
  std::erase_if(requests, [&](const SuiteRequest& request) {
    return finished.contains(request.start().id());
  });

  const PromptMaker prompts(*engine);
  ProgressLine progress(!flags.quiet);
  std::string shared;
  int64_t done = 0;
  for (SuiteRequest& request : requests) {
    progress.items(
        std::string(suite.name) + " " + request.task + " " + std::to_string(request.context),
        done++, std::ssize(requests));
    request.count = prompts.counter();
    request.reserve_tokens = mode == SolveMode::kDirect ? 0 : kReciteTokens + kReciteFrameTokens;
    CLO_ASSIGN(const EvalItem item, suite.make(request));
    if (item.shared_prefix.empty() || item.shared_prefix != shared) engine->drop_prefixes();
    shared = item.shared_prefix;
    auto record = run_item(*engine, item, policies, mode, flags.measure_sets ? &watcher : nullptr);
    if (!record) {
      Error error = std::move(record).error();
      if (error.where.empty()) error.where = item.id();
      return error;
    }
    CLO_TRY(log.append(to_line(*record)));
    records.push_back(std::move(*record));
  }
  progress.clear();

  const std::vector<SummaryRow> rows = summarise(records, names);
  const std::vector<SuiteFigure> figures = suite_figures(std::string(suite.name), records, names);
  print_summary(rows, figures);
  for (const std::string& line : summary_lines(std::string(suite.name), rows, figures)) {
    CLO_TRY(log.append(line));
  }
  if (flags.html.empty()) return 0;
  HtmlInput page{std::string(suite.name), flags.engine.model, {}, names, &records, &rows, &figures};
  page.facts = {
      {"command", command_line()}, {"commit", commit_name()}, {"machine", machine_name()}};
  for (const NamedPolicy& policy : policies) {
    page.facts.emplace_back(policy.name, describe(policy.options));
  }
  CLO_TRY(write_whole(flags.html, html_report(page)));
  return 0;
}

// What stands below the table, for --help.
std::string_view figures_of(std::string_view suite) {
  if (suite == "ruler") {
    return "Below the table: effective length (the longest context with an average of 85.6 or "
           "more), average and weighted\naverages over the contexts.\n";
  }
  if (suite == "position") {
    return "Below the table: average, largest gap and standard deviation over positions, of scores "
           "and of gold.\n";
  }
  if (suite == "multihop") {
    return "Below the table: evidence separated less adjacent, reversed less forward; with "
           "--measure-sets also how far sets\noverlap from step to step, and modes of attention; "
           "with --retrieve-then-solve how much was recited.\n";
  }
  if (suite == "length") {
    return "Below the table: what filler costs dense attention (B - A), the policy beside it (C - "
           "B), and both (C - A);\nwith --retrieve-then-solve how much of the evidence was "
           "recited.\n";
  }
  return "";
}

}  // namespace

std::vector<std::pair<CLI::App*, Command>> add_eval_suites(CLI::App& app) {
  std::vector<std::pair<CLI::App*, Command>> commands;
  for (const Suite& suite : all_suites()) {
    CLI::App* sub = app.add_subcommand(std::string(suite.name), std::string(suite.what));
    auto flags = std::make_shared<SuiteFlags>();
    SuiteFlags& f = *flags;
    f.engine.add_to(*sub, false);
    sub->add_option("--context", f.contexts, "Context lengths, such as 4096,8192 (4096)");
    sub->add_option("--tasks", f.tasks, "Some of " + list_of(suite.tasks) + " (all)");
    add_value(*sub, "--items", f.items, "Items per task and context (20)");
    add_value(*sub, "--seed", f.seed, "Seed of the items (0)");
    sub->add_option("--item", f.item, "One item alone, by the id it has in the results");
    if (suite.name == "niah") {
      add_value(*sub, "--depths", f.depths, "Depths from 0 to 100 %; --items counts for each (11)");
    }
    if (suite.name == "longbench") {
      sub->add_option("--data", f.data,
                      "JSON-lines files of LongBench; all their items by default");
    }
    if (suite.name == "length") {
      sub->add_option("--filler", f.filler,
                      "Some of none, prose, whitespace, masked (all); masked: prose that keeps its "
                      "positions and that no token may attend to (CPU)");
    }
    if (suite.name == "multihop") {
      sub->add_flag("--measure-sets", f.measure_sets,
                    "Also how far sets are those of the step before, and in how many places "
                    "attention lies (on the CPU, as --backend auto is then; slower)");
    }
    if (suite.can_retrieve_then_solve) {
      sub->add_option("--retrieve-then-solve", f.solve,
                      "First ask for the evidence (512 tokens), then solve: fresh (a new short "
                      "prompt) or keep (go on in the conversation)");
    }
    sub->add_option("--against", f.against, "What scores are compared with: dense");
    sub->add_option("-o,--output", f.output,
                    "Write every item as a JSON line; a stopped run goes on with its file");
    sub->add_option("--html", f.html, "Write a page with heat maps, curves and tables");
    sub->add_flag("--quiet", f.quiet, "No progress line");
    f.policies.add_to(*sub);
    sub->footer(
        std::string(figures_of(suite.name)) +
        "Columns: score under the policy and dense, 0 to 100; their difference on the same items "
        "with its 95 % interval;\nhit rate; attention mass kept; share of the evidence's rows "
        "that was attended (gold); rows read of those in context;\nbytes fetched per token. "
        "docs/evaluation.md explains every task.");
    commands.emplace_back(sub, [flags, &suite] { return run_suite(suite, *flags); });
  }
  return commands;
}

}  // namespace clo::app
