// clo bench train: how long hash training takes for a model shape. Windows are made up, with
// structure, so that recall says whether training works; a model's recall is `clo profile`'s.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/thread_pool.h"
#include "base/try.h"
#include "base/units.h"
#include "bench_commands.h"
#include "device/device_facts.h"
#include "flags.h"
#include "model/shapes.h"
#include "profile/measure.h"
#include "profile/structured_windows.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr uint64_t kWindowSeed = 11;

struct TrainFlags {
  std::string shape = "llama3-8b", bits = "128", backend = "auto", output;
  std::optional<std::string> device_memory;
  int64_t context = 2048, windows = 12, layers = 0, cpu_layers = 0;
  std::optional<int64_t> decode, runs;
  int32_t iterations = 1500, threads = 0;
  bool quiet = false;
};

// Seconds and recalls of one training of all heads.
struct TrainFigures {
  double seconds = 0;  // of measuring, training and judging
  Profile profile;
};

Result<TrainFigures> train(const ModelConfig& config, const KvShape& shape,
                           std::span<const WindowTrace> traces, const TrainFlags& flags,
                           int32_t bits, DeviceTraining* device, ThreadPool& pool) {
  MeasureOptions options;
  CLO_ASSIGN(options.policy, preset("default"));
  options.training.emplace();
  options.training->bits = bits;
  options.training->iterations = flags.iterations;
  options.device = device;
  ProgressLine progress(!flags.quiet);
  MeasureCalls calls;
  calls.on_progress = [&](int64_t done, int64_t total) {
    progress.items("measuring and training, heads", done, total);
  };
  calls.keep_going = [] { return !interrupted(); };
  TrainFigures figures;
  const Clock::time_point start = Clock::now();
  CLO_ASSIGN(figures.profile, measure_heads(shape, config.rope, traces, options, pool, calls));
  figures.seconds = seconds_since(start);
  progress.clear();
  return figures;
}

double mean_of(const std::vector<float>& values) {
  return values.empty() ? 0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

nlohmann::json recalls(const HeadStatistics& s) {
  return {{"recall_random", mean_of(s.recall_random)},
          {"recall_trained", mean_of(s.recall_trained)},
          {"recall_products", mean_of(s.recall_products)},
          {"weight_random", mean_of(s.weight_random)},
          {"weight_trained", mean_of(s.weight_trained)}};
}

Result<int> train_shape(const TrainFlags& flags) {
  CLO_ASSIGN(const ModelConfig config, model_shape(flags.shape));
  CLO_ASSIGN(const std::vector<int64_t> widths, parse_numbers(flags.bits, "--bits"));
  for (const int64_t bits : widths) {
    if (bits == 64 || bits == 128 || bits == 256) continue;
    return Error{ErrorCode::kBadFlag, "expected 64, 128 or 256, found " + std::to_string(bits),
                 "--bits"};
  }
  const int64_t decode = flags.decode.value_or(flags.context / 4);
  CLO_TRY(in_range("--context", flags.context, 512, int64_t{1} << 20));
  CLO_TRY(in_range("--decode", decode, 2 * kMaxLag, flags.context - 256));
  // As clo profile parts them.
  const int64_t most_runs = decode <= (flags.context - 1) / 2 ? decode / (2 * kMaxLag) : 1;
  const int64_t runs = flags.runs.value_or(std::min<int64_t>(8, most_runs));
  CLO_TRY(in_range("--runs", runs, 1, most_runs));
  CLO_TRY(in_range("--windows", flags.windows, 1, 1000));
  CLO_TRY(in_range("--iterations", flags.iterations, 1, 1'000'000));
  CLO_TRY(in_range("--layers", flags.layers, 0, config.num_layers));
  const int64_t layers = flags.layers > 0 ? flags.layers : config.num_layers;
  CLO_TRY(in_range("--cpu-layers", flags.cpu_layers, 0, layers));
  CLO_ASSIGN(const Backend backend, backend_of(flags.backend));
  int64_t device_bytes = 0;
  if (flags.device_memory) {
    auto bytes = parse_size(*flags.device_memory);
    if (!bytes) return Error{ErrorCode::kBadFlag, bytes.error().message, "--device-memory"};
    device_bytes = *bytes;
  }
  std::unique_ptr<DeviceTraining> device;
  if (backend != Backend::kCpu) {
    auto made = DeviceTraining::create(device_bytes);
    // A device that is there but cannot be used is no reason to time something else.
    if (!made && (backend == Backend::kCuda || device_facts())) return std::move(made).error();
    if (made) device = std::make_unique<DeviceTraining>(std::move(*made));
  }
  if (!flags.output.empty()) CLO_TRY(check_writable(flags.output));

  catch_interrupts();
  KvShape shape;
  shape.num_layers = static_cast<int32_t>(layers);
  shape.num_q_heads = static_cast<int32_t>(config.num_q_heads);
  shape.num_kv_heads = static_cast<int32_t>(config.num_kv_heads);
  shape.head_dim = static_cast<int32_t>(config.head_dim);
  shape.type = DType::kF32;
  const int threads = flags.threads > 0 ? flags.threads : num_processors();
  const std::string where = device ? device->device_name() : "the CPU";
  ThreadPool pool(threads);
  const Clock::time_point start = Clock::now();
  const std::vector<WindowTrace> traces = structured_windows(
      shape, flags.windows, flags.context - 1, decode / runs, runs, kWindowSeed, pool);
  const int64_t heads = layers * shape.num_kv_heads;
  const int64_t host_bytes =
      flags.windows * WindowTrace::bytes(shape, flags.context - 1, decode / runs * runs);
  std::printf("%ld heads (group %d, head_dim %d), %ld windows of %ld tokens, %s, made in %.1f s\n",
              static_cast<long>(heads), shape.group_size(), shape.head_dim,
              static_cast<long>(flags.windows), static_cast<long>(flags.context),
              format_bytes(host_bytes).c_str(), seconds_since(start));
  std::printf("training on %s, measuring on %d thread(s)\n", where.c_str(), threads);
  std::printf("%5s %9s %9s %9s %9s %8s %8s %9s %10s\n", "bits", "total s", "measure s", "load s",
              "train s", "random", "trained", "products", "device");
  nlohmann::json head = {{"kind", "run"},
                         {"bench", "train"},
                         {"commit", commit_name()},
                         {"command", command_line()},
                         {"machine", machine_name()},
                         {"device", where},
                         {"threads", threads},
                         {"shape", flags.shape},
                         {"layers", layers},
                         {"heads", heads},
                         {"context", flags.context},
                         {"decode", decode},
                         {"runs", runs},
                         {"windows", flags.windows},
                         {"iterations", flags.iterations},
                         {"window_bytes", host_bytes}};
  std::string lines = head.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  double load_before = 0, train_before = 0;
  for (const int64_t bits : widths) {
    CLO_ASSIGN(const TrainFigures all,
               train(config, shape, traces, flags, static_cast<int32_t>(bits), device.get(), pool));
    const HeadStatistics& s = all.profile.statistics;
    nlohmann::json line = {{"kind", "train"}, {"bits", bits}, {"seconds", all.seconds}};
    line.update(recalls(s));
    std::printf("%5ld %9.1f ", static_cast<long>(bits), all.seconds);
    if (device) {
      const double load = device->load_seconds() - load_before;
      const double steps = device->step_seconds() - train_before;
      load_before = device->load_seconds();
      train_before = device->step_seconds();
      line["measure_seconds"] = all.seconds - load - steps;
      line["load_seconds"] = load;
      line["train_seconds"] = steps;
      line["device_bytes"] = device->peak_bytes();
      line["device_used_bytes"] = device->peak_driver_bytes();
      std::printf("%9.1f %9.1f %9.1f ", all.seconds - load - steps, load, steps);
    } else {
      std::printf("%9s %9s %9s ", "-", "-", "-");
    }
    std::printf("%8.3f %8.3f %9.3f %10s\n", mean_of(s.recall_random), mean_of(s.recall_trained),
                mean_of(s.recall_products),
                device ? format_bytes(device->peak_bytes()).c_str() : "-");
    std::fflush(stdout);
    for (size_t h = 0; h < std::min<size_t>(4, s.recall_random.size()); ++h) {
      line["first_heads"].push_back(
          {{"recall_random", s.recall_random[h]}, {"recall_trained", s.recall_trained[h]}});
    }
    lines += line.dump() + "\n";
    if (!device || flags.cpu_layers == 0) continue;
    KvShape few = shape;
    few.num_layers = static_cast<int32_t>(flags.cpu_layers);
    const std::vector<WindowTrace> some = structured_windows(
        few, flags.windows, flags.context - 1, decode / runs, runs, kWindowSeed, pool);
    CLO_ASSIGN(const TrainFigures cpu,
               train(config, few, some, flags, static_cast<int32_t>(bits), nullptr, pool));
    const HeadStatistics& c = cpu.profile.statistics;
    double apart = 0, most = 0;
    for (size_t h = 0; h < c.recall_trained.size(); ++h) {
      const double difference = s.recall_trained[h] - c.recall_trained[h];
      apart += difference / static_cast<double>(c.recall_trained.size());
      most = std::max(most, std::abs(difference));
    }
    std::printf(
        "      the first %ld heads on the CPU: %.1f s; recall %.3f, the device's differ by %+.4f "
        "in "
        "the mean, %.4f at most\n",
        static_cast<long>(c.recall_trained.size()), cpu.seconds, mean_of(c.recall_trained), apart,
        most);
    nlohmann::json beside = {{"kind", "cpu"},
                             {"bits", bits},
                             {"heads", c.recall_trained.size()},
                             {"seconds", cpu.seconds},
                             {"mean_recall_difference", apart},
                             {"most_recall_difference", most}};
    beside.update(recalls(c));
    lines += beside.dump() + "\n";
  }
  if (!flags.output.empty()) CLO_TRY(write_whole(flags.output, lines));
  return 0;
}

}  // namespace

void add_train_bench(CLI::App& app, std::vector<BenchCommand>& commands) {
  CLI::App* sub = app.add_subcommand("train", "Hash training of a model shape's heads");
  auto flags = std::make_shared<TrainFlags>();
  TrainFlags& f = *flags;
  std::string shapes;
  for (const std::string& name : shape_names()) shapes += (shapes.empty() ? "" : ", ") + name;
  sub->add_option("--shape", f.shape, "Model shape: " + shapes + " (llama3-8b)");
  sub->add_option("--bits", f.bits, "Bits of a code, such as 64,128,256 (128)");
  sub->add_option("--backend", f.backend, "Where hashes are trained: auto, cpu, cuda (auto)");
  sub->add_option("--device-memory,--gpu-memory", f.device_memory,
                  "What training may take of the device (nine tenths of what is free)");
  add_value(*sub, "--context", f.context, "Tokens of a window (2048)");
  add_value(*sub, "--decode", f.decode, "Its tokens whose queries are used (a quarter)");
  add_value(*sub, "--runs", f.runs, "Stretches that these lie in, as clo profile has them (8)");
  add_value(*sub, "--windows", f.windows, "Windows; every fourth is held out (12)");
  add_value(*sub, "--iterations", f.iterations, "Steps of training (1500)");
  add_value(*sub, "--layers", f.layers, "Only the first layers of the shape (all)");
  add_value(*sub, "--cpu-layers", f.cpu_layers,
            "Train the first layers on the CPU too and compare (0)");
  add_value(*sub, "--threads", f.threads, "Threads that measure (all cores)");
  sub->add_option("-o,--output", f.output, "Write every figure as JSON lines");
  sub->add_flag("--quiet", f.quiet, "No progress line");
  sub->footer(
      "Windows are made up: keys and queries of a head differ in a few directions, so training has "
      "something to\nfind. measure: exact attention, statistics and recall, on the CPU; load: "
      "inputs made ready and copied.");
  commands.push_back({sub, [flags] { return train_shape(*flags); }});
}

}  // namespace clo::app
