// clo bench decode: tokens per second beside the bytes that a token reads and the read bandwidth
// of this machine, measured in the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/thread_pool.h"
#include "base/try.h"
#include "base/units.h"
#include "bench_commands.h"
#include "engine/backend.h"
#include "engine/memory.h"
#include "eval/documents.h"
#include "flags.h"
#include "io/model_files.h"
#include "model/weights.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kQuestionTokens = 64;  // kept free for the question and the chat template

struct DecodeFlags {
  EngineFlags engine;
  PolicyFlags policy;
  std::string contexts = "4096";
  std::string presets = "dense,default";
  std::string batches = "1";
  std::string output;
  int64_t tokens = 64;
  int64_t repeats = 3;
  bool quiet = false;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Bytes per second that all threads together read from memory: the best of several passes over a
// buffer far larger than any cache.
double read_bandwidth(int threads) {
  ThreadPool pool(threads);
  constexpr int64_t kWords = (int64_t{256} << 20) / 8;
  std::vector<uint64_t> buffer(static_cast<size_t>(kWords), 1);
  double best = 0;
  std::atomic<uint64_t> check{0};
  for (int pass = 0; pass < 12; ++pass) {
    const auto start = Clock::now();
    pool.run_ranges(kWords / 8, 512, [&](int64_t first, int64_t last) {
      uint64_t lanes[8] = {};
      const uint64_t* const end = buffer.data() + 8 * last;
      for (const uint64_t* at = buffer.data() + 8 * first; at < end; at += 8) {
        for (int j = 0; j < 8; ++j) lanes[j] += at[j];
      }
      uint64_t sum = 0;
      for (const uint64_t lane : lanes) sum += lane;
      check += sum;
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(kWords) * 8 / seconds);
  }
  // The sum must be used, or the loop would not be run.
  return check == 0 ? 0 : best;
}

struct Point {
  double tokens_per_second = 0;  // of the whole batch
  double bytes_per_token = 0;    // read per sequence and token, weights shared by the batch
  double prefill_seconds = 0;
  Report report;
};

// One timed run: `batch` sequences of the same document, each with its own question, all decoding
// together.
Result<Point> measure(Engine& engine, const std::string& document, const PolicyOptions& policy,
                      int64_t batch, int64_t tokens, int64_t weight_bytes, int64_t code_bits) {
  std::vector<RequestId> ids;
  for (int64_t b = 0; b < batch; ++b) {
    Request request;
    request.messages = {{"user", document + "\nWhat is the special magic number for item-" +
                                     std::to_string(b) + "?"}};
    request.max_new_tokens = tokens;
    request.ignore_eos = true;
    request.sampling = SamplingOptions{};
    request.policy = policy;
    CLO_ASSIGN(const RequestId id, engine.submit(std::move(request)));
    ids.push_back(id);
  }
  Point point;
  std::vector<Response> responses;
  while (engine.step()) {
  }
  double fetched = 0, attended = 0, codes = 0;
  for (const RequestId id : ids) {
    std::optional<Response> response = engine.take(id);
    if (!response) return Error{ErrorCode::kBadRequest, "a benchmark request was lost", ""};
    if (response->error) return *response->error;
    responses.push_back(std::move(*response));
    const Report& r = responses.back().report;
    const auto steps = static_cast<double>(std::max<int64_t>(r.decode_steps, 1));
    fetched += static_cast<double>(r.total.rows_fetched * r.row_bytes) / steps;
    attended += r.bytes_attended_per_token;
    const double selections =
        static_cast<double>(r.total.misses + r.total.aged + r.total.incomplete +
                            r.total.corrections + r.total.resident_selections) /
        steps;
    const double per_selection =
        selects_by_code(policy.select) ? static_cast<double>(r.prompt_tokens * code_bits) / 8 : 0;
    codes += selections * per_selection;
  }
  point.report = responses.back().report;
  point.prefill_seconds = responses.front().report.prefill_seconds;
  // The last sequence to start decodes beside all others until the first of them ends.
  point.tokens_per_second =
      responses.back().report.decode_tokens_per_second * static_cast<double>(batch);
  // A fetched row is read from the host store and written to its slot.
  point.bytes_per_token = (static_cast<double>(weight_bytes) + attended + codes + 2 * fetched) /
                          static_cast<double>(batch);
  return point;
}

void print_header(double bandwidth, int threads) {
  std::printf("read bandwidth: %.1f GB/s on %d thread(s)\n", bandwidth / 1e9, threads);
  std::printf("%8s %5s  %-10s %10s %9s %12s %8s %8s %9s %7s\n", "context", "batch", "preset",
              "tokens/s", "x dense", "bytes/token", "GB/s", "of floor", "hit rate", "fetched");
}

Result<int> decode(const DecodeFlags& flags) {
  CLO_ASSIGN(const std::vector<int64_t> contexts, parse_numbers(flags.contexts, "--context"));
  CLO_ASSIGN(const std::vector<int64_t> batches, parse_numbers(flags.batches, "--batch"));
  if (flags.tokens < 2 || flags.tokens > (1 << 20)) {
    return Error{ErrorCode::kBadFlag,
                 "expected 2 to 1048576, found " + std::to_string(flags.tokens), "--tokens"};
  }
  if (flags.repeats < 1 || flags.repeats > 1000) {
    return Error{ErrorCode::kBadFlag, "expected 1 to 1000, found " + std::to_string(flags.repeats),
                 "--repeats"};
  }
  if (const int64_t most = *std::max_element(batches.begin(), batches.end()); most > 512) {
    return Error{ErrorCode::kBadFlag, "expected 1 to 512, found " + std::to_string(most),
                 "--batch"};
  }
  std::vector<std::pair<std::string, PolicyOptions>> policies;
  for (const std::string& name : split_list(flags.presets)) {
    PolicyFlags one = flags.policy;
    if (name == "dense") one = PolicyFlags{};
    CLO_ASSIGN(PolicyOptions policy, one.resolve(name));
    policies.emplace_back(name, policy);
  }
  CLO_ASSIGN(EngineOptions options, flags.engine.resolve());
  options.max_batch = static_cast<int32_t>(*std::max_element(batches.begin(), batches.end()));
  std::vector<PolicyOptions> all;
  for (const auto& [name, policy] : policies) all.push_back(policy);
  options.policy = widest(all);
  if (!flags.output.empty()) CLO_TRY(check_writable(flags.output));
  CLO_ASSIGN(const std::unique_ptr<Engine> engine, Engine::load(options));
  // Room for the question, the chat template and at least a page of the document.
  const int64_t least = flags.tokens + kQuestionTokens + 256;
  for (const int64_t context : contexts) {
    if (context >= least && context <= engine->max_context_tokens()) continue;
    return Error{ErrorCode::kBadFlag,
                 "expected " + std::to_string(least) + " to " +
                     std::to_string(engine->max_context_tokens()) + " (the model's limit), found " +
                     std::to_string(context),
                 "--context"};
  }
  CLO_ASSIGN(const ModelFiles model, ModelFiles::find(options.model_dir));
  CLO_ASSIGN(const ModelConfig config, model.config());
  CLO_ASSIGN(const BackendChoice choice, choose_backend(config, options));
  EngineOptions chosen = options;
  chosen.backend = choice.backend;
  const KvShape shape = kv_shape(config, chosen);
  const int64_t weight_bytes = clo::weight_bytes(config, chosen);
  const int threads = options.threads > 0 ? options.threads : num_processors();
  const double bandwidth = read_bandwidth(threads);

  nlohmann::json head = {{"kind", "run"},
                         {"bench", "decode"},
                         {"commit", commit_name()},
                         {"model", flags.engine.model},
                         {"command", command_line()},
                         {"machine", machine_name()},
                         {"kv_type", kv_type_name(shape)},
                         {"threads", threads},
                         {"read_bandwidth_bytes_per_s", bandwidth},
                         {"tokens", flags.tokens},
                         {"repeats", flags.repeats}};
  std::string lines = head.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  const TokenCounter count = [&](std::string_view text) -> Result<int64_t> {
    CLO_ASSIGN(const auto ids, engine->encode(text));
    return std::ssize(ids);
  };
  for (const int64_t context : contexts) {
    CLO_ASSIGN(const std::string document,
               plant_facts({}, FillerText::prose(static_cast<uint64_t>(context)),
                           context - flags.tokens - kQuestionTokens, 0, count));
    for (const int64_t batch : batches) {
      std::vector<std::vector<double>> rates(policies.size());
      std::vector<Point> points(policies.size());
      // The first round also computes the document's prefill, which the others share; it is not
      // counted. Presets alternate, so that a drift of the machine meets all of them.
      for (int64_t repeat = -1; repeat < flags.repeats; ++repeat) {
        for (size_t p = 0; p < policies.size(); ++p) {
          ProgressLine progress(!flags.quiet);
          progress.items(policies[p].first + ", context " + std::to_string(context), repeat + 1,
                         flags.repeats + 1);
          CLO_ASSIGN(points[p], measure(*engine, document, policies[p].second, batch, flags.tokens,
                                        weight_bytes, options.code_bits));
          if (repeat >= 0) rates[p].push_back(points[p].tokens_per_second);
        }
      }
      if (context == contexts.front() && batch == batches.front()) print_header(bandwidth, threads);
      double dense_rate = 0;
      for (size_t p = 0; p < policies.size(); ++p) {
        if (policies[p].first == "dense") dense_rate = median(rates[p]);
      }
      for (size_t p = 0; p < policies.size(); ++p) {
        const double rate = median(rates[p]);
        const double achieved = rate * points[p].bytes_per_token;
        std::printf(
            "%8ld %5ld  %-10s %10.1f %9s %12s %8.2f %7.1f%% %8.1f%% %7s\n",
            static_cast<long>(context), static_cast<long>(batch), policies[p].first.c_str(), rate,
            dense_rate > 0 ? (std::to_string(rate / dense_rate).substr(0, 5)).c_str() : "-",
            format_bytes(static_cast<int64_t>(points[p].bytes_per_token)).c_str(), achieved / 1e9,
            100 * achieved / bandwidth, 100 * points[p].report.hit_rate,
            format_bytes(static_cast<int64_t>(points[p].report.bytes_fetched_per_token)).c_str());
        std::fflush(stdout);
        nlohmann::json line = {{"kind", "point"},
                               {"context", context},
                               {"batch", batch},
                               {"shared_document", true},
                               {"preset", policies[p].first},
                               {"flags", describe(policies[p].second)},
                               {"tokens_per_second", rates[p]},
                               {"median_tokens_per_second", rate},
                               {"bytes_per_token", points[p].bytes_per_token},
                               {"share_of_floor", achieved / bandwidth},
                               {"report", nlohmann::json::parse(report_json(points[p].report))}};
        if (dense_rate > 0) line["ratio_to_dense"] = rate / dense_rate;
        line["report"].erase("layers");
        lines += line.dump() + "\n";
      }
    }
    engine->drop_prefixes();
  }
  if (!flags.output.empty()) CLO_TRY(write_whole(flags.output, lines));
  return 0;
}

}  // namespace

Command add_bench(CLI::App& app) {
  app.require_subcommand(1);
  CLI::App* sub = app.add_subcommand("decode", "Tokens per second of decode, under each preset");
  auto flags = std::make_shared<DecodeFlags>();
  DecodeFlags& f = *flags;
  f.engine.add_to(*sub, false);
  sub->add_option("--context", f.contexts, "Context lengths, such as 4096,16384 (4096)");
  sub->add_option("--preset", f.presets, "Presets to compare (dense,default)");
  sub->add_option("--batch", f.batches, "Sequences at once, such as 1,8 (1)");
  add_value(*sub, "--tokens", f.tokens, "Tokens to generate (64)");
  add_value(*sub, "--repeats", f.repeats, "Timed runs of each; the median counts (3)");
  sub->add_option("-o,--output", f.output, "Write every point as JSON lines");
  sub->add_flag("--quiet", f.quiet, "No progress line");
  f.policy.add_to(*sub, false);
  sub->footer(
      "Prompts are real text; selection and fetches are inside the timing. Sequences of a batch "
      "share "
      "the document\nand its pages. bytes/token: weights (shared by the batch), rows attended, "
      "codes "
      "read by selections, fetched rows\ntwice (read, written). of floor: those bytes per second "
      "over "
      "the read bandwidth measured in this run.");
  std::vector<BenchCommand> commands = {{sub, [flags] { return decode(*flags); }}};
  add_gpu_benches(app, commands);
  add_train_bench(app, commands);
  return [commands]() -> Result<int> {
    for (const BenchCommand& command : commands) {
      if (command.sub->parsed()) return command.run();
    }
    return Error{ErrorCode::kBadFlag, "no benchmark was named", "clo bench"};
  };
}

}  // namespace clo::app
