// clo profile: measures a model's heads on a text, trains its hashes, and says what follows.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/thread_pool.h"
#include "base/try.h"
#include "base/units.h"
#include "commands.h"
#include "device/device_facts.h"
#include "engine/backend.h"
#include "engine/memory.h"
#include "eval/profile_run.h"
#include "flags.h"
#include "io/model_files.h"
#include "profile/gates.h"
#include "profile/measure.h"
#include "profile/profile_file.h"
#include "profile_views.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct ProfileFlags {
  EngineFlags engine;
  PolicyFlags policy;
  PlanFlags plan;
  std::vector<std::string> texts;
  std::string contexts = "2048";
  int64_t windows = 12;
  std::optional<int64_t> decode, runs;
  int32_t iterations = 1500;
  std::string recipe = "boundary", gates, output, json;
  std::optional<std::string> importance;  // absent: none, or the gates
  bool print_plan = false, quiet = false;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The recipe, or nothing for "none". Fails: kBadFlag.
Result<std::optional<HashTraining>> training_of(const ProfileFlags& flags) {
  HashTraining training;
  training.bits = flags.engine.bits.value_or(128);
  training.iterations = flags.iterations;
  if (training.bits != 64 && training.bits != 128 && training.bits != 256) {
    return Error{ErrorCode::kBadFlag,
                 "expected 64, 128 or 256, found " + std::to_string(training.bits), "--bits"};
  }
  if (flags.recipe == "none") return std::optional<HashTraining>();
  if (flags.recipe == "published") {
    training.recipe = HashRecipe::kPublished;
  } else if (flags.recipe != "boundary") {
    return Error{ErrorCode::kBadFlag,
                 "expected one of boundary, published, none, found \"" + flags.recipe + "\"",
                 "--recipe"};
  }
  return std::optional<HashTraining>(training);
}

// The shortest and the longest window: as given, or half of the longest. Fails: kBadFlag.
struct WindowRange {
  int64_t shortest = 0, longest = 0;
};
Result<WindowRange> window_range(const std::string& contexts) {
  CLO_ASSIGN(const std::vector<int64_t> given, parse_numbers(contexts, "--context"));
  const WindowRange range = {given.size() == 1 ? given[0] / 2 : given[0], given.back()};
  if (given.size() > 2 || range.shortest > range.longest) {
    return Error{ErrorCode::kBadFlag,
                 "expected the longest window, such as 2048, or the shortest and the longest, such "
                 "as 1024,32768; found \"" +
                     contexts + "\"",
                 "--context"};
  }
  CLO_TRY(in_range("--context", range.longest, 256, int64_t{1} << 24));
  return range;
}

// What is recorded of which windows. Fails: kBadFlag.
Result<ProfileRun> profile_run(const ProfileFlags& flags, const WindowRange& range,
                               const PolicyOptions& policy) {
  constexpr int64_t kDefaultRuns = 8;
  CLO_TRY(in_range("--windows", flags.windows, 1, 10'000));
  const int64_t decode = flags.decode.value_or(std::max<int64_t>(range.shortest / 4, 2 * kMaxLag));
  // Every step must have candidates enough to train with, and queries kMaxLag steps apart.
  const int64_t least_context = policy.sink + policy.recent + 128;
  const int64_t most = range.shortest - least_context;
  if (most < 2 * kMaxLag) {
    return Error{ErrorCode::kBadFlag,
                 "expected at least " + std::to_string(least_context + 2 * kMaxLag) +
                     " tokens in the shortest window, so that 128 are left to choose from beside "
                     "--sink and --recent; found " +
                     std::to_string(range.shortest),
                 "--context"};
  }
  CLO_TRY(in_range("--decode", decode, 2 * kMaxLag, most));
  // Runs lie in the second half of a window and do not overlap.
  const int64_t half = (range.shortest - 1) / 2;
  const int64_t most_runs = half >= least_context && decode <= half ? decode / (2 * kMaxLag) : 1;
  const int64_t runs = flags.runs.value_or(std::min(kDefaultRuns, most_runs));
  if (runs < 1 || runs > most_runs) {
    return Error{
        ErrorCode::kBadFlag,
        "expected 1 to " + std::to_string(most_runs) + ", found " + std::to_string(runs) +
            ": a run has at least " + std::to_string(2 * kMaxLag) + " of the " +
            std::to_string(decode) +
            " tokens of --decode, and several need a second half of the shortest window (" +
            std::to_string(half) + " tokens) that holds them and begins with " +
            std::to_string(least_context) + " tokens in context",
        "--runs"};
  }
  return ProfileRun{range.shortest, range.longest, decode, flags.windows, runs};
}

void add_facts(Profile& profile, const ProfileFlags& flags, const PolicyOptions& policy,
               const std::vector<WindowTrace>& traces, int64_t text_tokens) {
  std::string names;
  for (const std::string& path : flags.texts) {
    names += (names.empty() ? "" : ", ") + path.substr(path.find_last_of('/') + 1);
  }
  profile.facts = {
      {"texts", names},
      {"text_tokens", std::to_string(text_tokens)},
      {"windows", std::to_string(traces.size())},
      {"context", flags.contexts},
      {"runs", std::to_string(traces[0].num_runs())},
      {"steps", std::to_string(traces[0].num_steps() * traces[0].num_runs() * std::ssize(traces))},
      {"measured_ratio", std::to_string(kMeasuredRatio)},
      {"policy", describe(policy)},
      {"importance", profile.heads.importance.empty() ? "none"
                     : flags.gates.empty()            ? "attention outside sink and recent"
                                                      : "gates of a file"},
      {"hash", profile.code_bits == 0
                   ? "none"
                   : flags.recipe + ", " + std::to_string(profile.code_bits) + " bits" +
                         (flags.recipe == "boundary"
                              ? ", " + std::to_string(flags.iterations) + " iterations"
                              : "")},
      {"made_by", "clo " + std::string(version()) + " " + commit_name()}};
}

// Where hashes are trained. Fails: as device_facts() where CUDA was named.
struct TrainingPlace {
  std::optional<DeviceTraining> device;
  std::string name = "the CPU";  // for people
};
Result<TrainingPlace> training_place(const std::optional<HashTraining>& training, Backend backend,
                                     int64_t device_memory_bytes) {
  TrainingPlace place;
  if (!training || backend == Backend::kCpu) return place;
  if (backend != Backend::kCuda && !device_facts()) return place;  // no device: nothing to explain
  if (training->recipe != HashRecipe::kBoundary) {
    place.name += " (the published recipe has no other trainer)";
    return place;
  }
  auto device = DeviceTraining::create(device_memory_bytes);
  if (!device) {
    if (backend == Backend::kCuda) return std::move(device).error();
    place.name += " (" + device.error().message + ")";
    return place;
  }
  place.name = device->device_name();
  place.device = std::move(*device);
  return place;
}

double mean_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float v : values) sum += v;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

std::string json_lines(const Profile& profile, const ProfileFlags& flags, const KvShape& shape,
                       const std::string& recorded_on, double record_seconds,
                       double measure_seconds, int threads, const TrainingPlace& place) {
  const HeadStatistics& s = profile.statistics;
  nlohmann::json run = {{"kind", "run"},
                        {"suite", "profile"},
                        {"commit", commit_name()},
                        {"version", version()},
                        {"command", command_line()},
                        {"machine", machine_name()},
                        {"threads", threads},
                        {"model", flags.engine.model},
                        {"recorded_on", recorded_on},
                        {"record_seconds", record_seconds},
                        {"measure_and_train_seconds", measure_seconds}};
  if (profile.code_bits != 0) run["trained_on"] = place.name;
  if (place.device) {
    run["device_load_seconds"] = place.device->load_seconds();
    run["device_train_seconds"] = place.device->step_seconds();
  }
  for (const auto& [name, value] : profile.facts) run[name] = value;
  nlohmann::json summary = {{"kind", "summary"},
                            {"mass_outside", mean_of(s.mass_outside)},
                            {"difficulty", mean_of(profile.heads.difficulty)},
                            {"set_overlap", mean_of(s.overlap)},
                            {"new_rows_on_a_miss", mean_of(s.new_on_miss)},
                            {"entropy", mean_of(s.entropy)},
                            {"modes", mean_of(s.modes)}};
  if (!s.recall_trained.empty()) {
    summary["recall_random"] = mean_of(s.recall_random);
    summary["recall_trained"] = mean_of(s.recall_trained);
    summary["recall_products"] = mean_of(s.recall_products);
    summary["weight_random"] = mean_of(s.weight_random);
    summary["weight_trained"] = mean_of(s.weight_trained);
    summary["weight_products"] = mean_of(s.weight_products);
    int64_t kept = 0;
    for (size_t i = 0; i < s.recall_random.size(); ++i) {
      kept += s.recall_trained[i] <= s.recall_random[i];
    }
    summary["heads_left_random"] = kept;
  }
  std::string lines = run.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n" +
                      summary.dump() + "\n";
  const auto heads = static_cast<size_t>(shape.num_kv_heads);
  const auto group = static_cast<size_t>(shape.group_size());
  for (size_t head = 0; head < s.overlap.size(); ++head) {
    nlohmann::json line = {{"kind", "head"},
                           {"layer", head / heads},
                           {"kv_head", head % heads},
                           {"difficulty", profile.heads.difficulty[head]},
                           {"set_overlap", s.overlap[head]},
                           {"new_rows_on_a_miss", s.new_on_miss[head]}};
    for (size_t q = head * group; q < (head + 1) * group; ++q) {
      const size_t at = q * kMaxLag * kNumSpread;
      line["mass_outside"].push_back(s.mass_outside[q]);
      if (!profile.heads.importance.empty()) {
        line["importance"].push_back(profile.heads.importance[q]);
      }
      line["entropy"].push_back(s.entropy[q]);
      line["modes"].push_back(s.modes[q]);
      line["cosine_lag_1"].push_back(s.cosine[at]);
      line["cosine_lag_16"].push_back(s.cosine[at + (kMaxLag - 1) * kNumSpread]);
      line["cosine_lag_1_unrotated"].push_back(s.cosine_unrotated[at]);
    }
    if (!s.recall_trained.empty()) {
      line["recall_random"] = s.recall_random[head];
      line["recall_trained"] = s.recall_trained[head];
      line["recall_products"] = s.recall_products[head];
      line["weight_random"] = s.weight_random[head];
      line["weight_trained"] = s.weight_trained[head];
      line["weight_products"] = s.weight_products[head];
    }
    lines += line.dump() + "\n";
  }
  return lines;
}

Result<int> profile_model(const ProfileFlags& flags) {
  CLO_ASSIGN(EngineOptions options, flags.engine.resolve());
  CLO_ASSIGN(const PolicyOptions policy, flags.policy.resolve());
  if (!flags.engine.profile.empty()) {
    return Error{ErrorCode::kBadFlag, "a profile is what this makes; drop it", "--profile"};
  }
  if (policy.select == Select::kNone) {
    return Error{ErrorCode::kBadFlag,
                 "expected a policy that chooses sets, found one that attends to every row",
                 "--preset or --select"};
  }
  CLO_ASSIGN(const WindowRange range, window_range(flags.contexts));
  CLO_TRY(in_range("--iterations", flags.iterations, 1, 1'000'000));
  CLO_ASSIGN(const ProfileRun run, profile_run(flags, range, policy));
  MeasureOptions measure;
  measure.policy = policy;
  CLO_ASSIGN(measure.training, training_of(flags));
  const std::string importance = flags.importance.value_or("none");
  if (importance != "mass" && importance != "none") {
    return Error{ErrorCode::kBadFlag, "expected one of mass, none, found \"" + importance + "\"",
                 "--importance"};
  }
  if (flags.importance && !flags.gates.empty()) {
    return Error{ErrorCode::kBadFlag, "contradict each other: gates are importance; drop one",
                 "--importance and --gates"};
  }
  measure.importance = importance == "mass" ? Importance::kMass : Importance::kNone;
  CLO_ASSIGN(TrainingPlace place,
             training_place(measure.training, options.backend, options.device_memory_bytes));
  if (place.device) measure.device = &*place.device;
  CLO_TRY(check_writable(flags.output));
  if (!flags.json.empty()) CLO_TRY(check_writable(flags.json));
  std::string text;
  for (const std::string& path : flags.texts) {
    CLO_ASSIGN(const std::string more, read_text(path));
    text += more;
  }

  // The engine that is recorded: dense, one sequence.
  TraceRecorder recorder;
  options.observer = &recorder;
  options.max_context_tokens = range.longest;
  options.max_batch = 1;
  options.keep_prefixes = false;
  CLO_ASSIGN(options.policy, preset("dense"));
  CLO_ASSIGN(const ModelFiles model, ModelFiles::find(options.model_dir));
  CLO_ASSIGN(const ModelConfig config, model.config());
  if (!flags.gates.empty()) {
    CLO_ASSIGN(const std::string gates, read_text(flags.gates));
    measure.importance = Importance::kGates;
    CLO_ASSIGN(measure.gates,
               parse_gates(gates, config.num_layers, config.num_kv_heads, flags.gates));
  }
  CLO_ASSIGN(const BackendChoice backend, choose_backend(config, options));
  options.backend = backend.backend;
  const std::string recorded_on =
      (backend.backend == Backend::kCuda ? "the GPU" : "the CPU") +
      (backend.note.empty() ? std::string() : " (" + backend.note + ")");
  CLO_ASSIGN(std::unique_ptr<Engine> engine, Engine::load(options));
  CLO_ASSIGN(const std::vector<int32_t> ids, engine->encode(text));

  catch_interrupts();
  const auto keep_going = [] { return !interrupted(); };
  ProgressLine progress(!flags.quiet);
  Clock::time_point start = Clock::now();
  const KvShape shape = kv_shape(config, options);
  auto traces = record_windows(
      *engine, shape, recorder, ids, run,
      {[&](int64_t done, int64_t total) { progress.items("recording, tokens", done, total); },
       keep_going});
  progress.clear();
  if (!traces) return std::move(traces).error();
  const double record_seconds = seconds_since(start);
  engine.reset();  // its memory and its threads are not needed any more

  const int threads = options.threads == 0 ? num_processors() : options.threads;
  ThreadPool pool(threads);
  ProgressLine heads_progress(!flags.quiet);
  start = Clock::now();
  auto made = measure_heads(
      shape, config.rope, *traces, measure, pool,
      {[&](int64_t done, int64_t total) { heads_progress.items("measuring, heads", done, total); },
       keep_going});
  heads_progress.clear();
  if (!made) return std::move(made).error();
  Profile& profile = *made;
  const double measure_seconds = seconds_since(start);
  add_facts(profile, flags, policy, *traces, std::ssize(ids));

  CLO_TRY(write_whole(flags.output, profile_bytes(profile, config)));
  if (!flags.json.empty()) {
    CLO_TRY(write_whole(flags.json, json_lines(profile, flags, shape, recorded_on, record_seconds,
                                               measure_seconds, threads, place)));
  }
  print_statistics(profile, shape, false);
  std::printf("\n  recorded on %s in %.1f s, measured%s in %.1f s\n", recorded_on.c_str(),
              record_seconds, measure.training ? " and trained" : "", measure_seconds);
  if (measure.training) std::printf("  hashes were trained on %s\n", place.name.c_str());
  if (!flags.print_plan) return 0;
  KvShape planned = shape;
  planned.code_bits = options.code_bits;
  CLO_TRY(flags.plan.print(profile, planned, policy, range.longest));
  return 0;
}

}  // namespace

Command add_profile(CLI::App& app) {
  auto flags = std::make_shared<ProfileFlags>();
  ProfileFlags& f = *flags;
  f.engine.add_to(app, false);
  app.add_option("--text", f.texts, "Text files, one after another")->required()->type_name("FILE");
  add_value(app, "-o,--output", f.output, "The profile to write")->required()->type_name("FILE");
  add_value(app, "--context", f.contexts,
            "Tokens of the longest window of the text, the longest context to be served (2048); or "
            "of the shortest, which is half of it, and the longest: 1024,32768")
      ->type_name("TEXT");
  add_value(app, "--decode", f.decode,
            "Tokens of a window whose queries are kept (a quarter of the shortest)");
  add_value(
      app, "--runs", f.runs,
      "Stretches that these lie in, spread over a window's second half (8, or as many as have "
      "room); 1: at its end");
  add_value(app, "--windows", f.windows,
            "At most so many windows, spread evenly over the text (12)");
  add_value(app, "--recipe", f.recipe,
            "How hash weights are trained: boundary, published (to compare with), none");
  add_value(app, "--iterations", f.iterations, "Of boundary, for each KV head (1500)");
  app.add_option(
         "--importance", f.importance,
         "Of every head: none, or mass (attention on neither sink nor recent tokens), which "
         "loosens thresholds: take --eta and its exponent from the plan then")
      ->type_name("TEXT");
  add_value(app, "--gates", f.gates,
            "Importance of every KV head from a file (DuoAttention's full_attention_heads.tsv, or "
            "a JSON array of arrays)")
      ->type_name("FILE");
  add_value(app, "--json", f.json, "Write the figures as JSON lines")->type_name("FILE");
  app.add_flag("--plan", f.print_plan, "Print what the profile says of a machine");
  app.add_flag("--quiet", f.quiet, "No progress line");
  f.plan.add_to(app);
  f.policy.add_to(app);
  app.footer(
      "Dense attention reads the text and nothing is generated; the policy's "
      "flags say what is\ncounted as sink and recent and which threshold difficulty is measured "
      "against. docs/profile.md defines the figures.");
  return [flags] { return profile_model(*flags); };
}

}  // namespace clo::app
