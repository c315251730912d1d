// clo bench step, fetch and prefill: what a GPU does with a model shape whose weights and rows are
// random. Hits and overlaps of random rows mean nothing, so they are forced where a figure depends
// on them, and every line says so.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/units.h"
#include "bench_commands.h"
#include "cuda/measure.h"
#include "device/device_facts.h"
#include "engine/backend.h"
#include "flags.h"
#include "model/shapes.h"
#include "terminal.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct GpuFlags {
  PolicyFlags policy;
  std::string shape = "llama3-8b";
  std::string preset = "default";
  std::optional<std::string> device_memory, host_memory;
  std::string weights = "auto", kv_type = "bf16";
  std::string output;
  int64_t context = 131072;
  int32_t batch = 1;
  int32_t bits = 128;
  int32_t threads = 0;
  int32_t clusters = 0;
  int32_t fetch_warps = kDefaultFetchWarps;
  uint32_t nap = kDefaultScoreNapNs;
};

void add_common(CLI::App& app, GpuFlags& f) {
  std::string shapes;
  for (const std::string& name : shape_names()) shapes += (shapes.empty() ? "" : ", ") + name;
  app.add_option("--shape", f.shape, "Model shape: " + shapes + " (llama3-8b)");
  add_value(app, "--context", f.context, "Tokens in the cache (131072)");
  add_value(app, "--batch", f.batch, "Sequences at once (1)");
  app.add_option("--preset", f.preset, "Policy (default)");
  app.add_option("--device-memory,--gpu-memory", f.device_memory,
                 "Device memory of the process in all, such as 40GiB (what is free)");
  app.add_option("--host-memory", f.host_memory, "Host store, pinned (what the batch needs)");
  app.add_option("--weights", f.weights, "Weights: auto (bf16), bf16, int8, q4");
  app.add_option("--kv-type", f.kv_type, "Host rows and slots: bf16, int8, fp8");
  add_value(app, "--bits", f.bits, "Bits of a key's code (128)");
  add_value(app, "--threads", f.threads, "Threads that touch memory before it is pinned (all)");
  add_value(app, "--refresh-clusters", f.clusters,
            "Clusters of blocks that refresh beside the layers (0: by the jobs there are)");
  add_value(app, "--fetch-warps", f.fetch_warps, "Warps of each of their blocks that fetch (1)");
  add_value(app, "--score-nap", f.nap,
            "Nanoseconds that they rest after two pages of a choice without hurry (4000)");
  app.add_option("-o,--output", f.output, "Write every figure as JSON lines");
  f.policy.add_to(app, false);
}

Result<MeasureOptions> resolve(const GpuFlags& f) {
  MeasureOptions options;
  if (const auto facts = device_facts(); !facts) {
    return Error{ErrorCode::kDeviceFault,
                 "measures a GPU, and none can be used here (" + facts.error().message +
                     "); clo bench decode runs on the CPU",
                 "clo bench"};
  }
  CLO_ASSIGN(options.config, model_shape(f.shape));
  const auto size = [](const char* flag, const std::optional<std::string>& text,
                       int64_t& target) -> Status {
    if (!text) return Ok{};
    auto bytes = parse_size(*text);
    if (!bytes) return Error{ErrorCode::kBadFlag, bytes.error().message, flag};
    target = *bytes;
    return Ok{};
  };
  CLO_TRY(size("--device-memory", f.device_memory, options.device_memory_bytes));
  CLO_TRY(size("--host-memory", f.host_memory, options.host_memory_bytes));
  if (f.context < 256 || f.context > options.config.max_positions) {
    return Error{ErrorCode::kBadFlag,
                 "expected 256 to " + std::to_string(options.config.max_positions) + ", found " +
                     std::to_string(f.context),
                 "--context"};
  }
  if (f.batch < 1 || f.batch > 512) {
    return Error{ErrorCode::kBadFlag, "expected 1 to 512, found " + std::to_string(f.batch),
                 "--batch"};
  }
  CLO_ASSIGN(options.weights, weight_storage_of(f.weights));
  if (f.kv_type == "int8") {
    options.stored_rows = RowFormat::kInt8;
  } else if (f.kv_type == "fp8") {
    options.stored_rows = RowFormat::kFp8;
  } else if (f.kv_type != "bf16") {
    return Error{ErrorCode::kBadFlag, "expected bf16, int8 or fp8, found \"" + f.kv_type + "\"",
                 "--kv-type"};
  }
  options.context_tokens = f.context;
  options.batch = f.batch;
  if (f.bits < 64 || f.bits > kMaxCodeBits || f.bits % 64 != 0) {
    return Error{ErrorCode::kBadFlag,
                 "expected a multiple of 64 up to " + std::to_string(kMaxCodeBits) + ", found " +
                     std::to_string(f.bits),
                 "--bits"};
  }
  options.code_bits = f.bits;
  if (f.clusters < 0 || f.clusters > 32) {
    return Error{ErrorCode::kBadFlag, "expected 0 to 32, found " + std::to_string(f.clusters),
                 "--refresh-clusters"};
  }
  options.queue_clusters = f.clusters;
  if (f.fetch_warps < 1 || f.fetch_warps > 8) {
    return Error{ErrorCode::kBadFlag, "expected 1 to 8, found " + std::to_string(f.fetch_warps),
                 "--fetch-warps"};
  }
  options.fetch_warps = f.fetch_warps;
  options.score_nap_ns = f.nap;
  options.host_threads = f.threads > 0 ? f.threads : num_cpus();
  CLO_ASSIGN(options.policy, f.policy.resolve(f.preset));
  options.policy = for_backend(options.policy, Backend::kCuda);
  return options;
}

nlohmann::json head_line(const char* bench, const GpuFlags& f, const CudaMeasure& measure,
                         const Ceilings& ceilings) {
  return {{"kind", "run"},
          {"bench", bench},
          {"commit", commit_name()},
          {"command", command_line()},
          {"machine", machine_name()},
          {"device", measure.description()},
          {"shape", f.shape},
          {"context", f.context},
          {"batch", f.batch},
          {"weights", f.weights},
          {"kv_type", f.kv_type},
          {"refresh_clusters", f.clusters},
          {"fetch_warps", f.fetch_warps},
          {"score_nap_ns", f.nap},
          {"device_memory", f.device_memory.value_or("free")},
          {"hbm_read_bytes_per_s", ceilings.hbm_read_bytes_per_s},
          {"link_copy_bytes_per_s", ceilings.link_copy_bytes_per_s},
          {"pin_seconds", measure.pin_seconds()}};
}

void print_ceilings(const CudaMeasure& measure, const Ceilings& c) {
  std::printf("%s\nmeasured in this run: device memory read %.2f TB/s, link %.1f GB/s\n",
              measure.description().c_str(), c.hbm_read_bytes_per_s / 1e12,
              c.link_copy_bytes_per_s / 1e9);
}

struct StepFlags {
  GpuFlags gpu;
  std::string hit_rates, new_shares;
  double correction_share = 0;
  int64_t warm_up = 20;
  int64_t steps = 200;
  int32_t dense_batch = 0;
  bool stages = false, mass_looks = false;
};

Result<std::vector<double>> parse_shares(const std::string& text, const char* flag) {
  std::vector<double> values;
  if (text.empty()) return values;
  for (const std::string& part : split_list(text)) {
    double value = 0;
    const auto [end, fault] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (fault != std::errc() || end != part.data() + part.size() || value < 0 || value > 1) {
      return Error{ErrorCode::kBadFlag, "expected shares from 0 to 1, found \"" + part + "\"",
                   flag};
    }
    values.push_back(value);
  }
  return values;
}

struct StepPoint {
  std::string name;
  ForcedReuse forced;
};

Result<std::vector<StepPoint>> step_points(const StepFlags& flags, const PolicyOptions& policy) {
  if (!(flags.correction_share >= 0 && flags.correction_share <= 1)) {
    return Error{ErrorCode::kBadFlag,
                 "expected a share from 0 to 1, found " + std::to_string(flags.correction_share),
                 "--force-correction-share"};
  }
  if (flags.correction_share > 0 && policy.correction != Correction::kTrueQuery) {
    return Error{ErrorCode::kBadFlag,
                 "contradict each other: only --correction true_query finds misses that way",
                 "--force-correction-share and --correction none"};
  }
  std::vector<StepPoint> points = {{"natural", {}}};
  CLO_ASSIGN(const std::vector<double> hits, parse_shares(flags.hit_rates, "--force-hit-rate"));
  CLO_ASSIGN(const std::vector<double> news, parse_shares(flags.new_shares, "--force-new-share"));
  if (hits.size() != news.size()) {
    return Error{ErrorCode::kBadFlag,
                 "contradict each other: " + std::to_string(hits.size()) + " and " +
                     std::to_string(news.size()) + " values, which go in pairs",
                 "--force-hit-rate and --force-new-share"};
  }
  for (size_t i = 0; i < hits.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "forced %.0f/%.0f", 100 * (1 - hits[i]), 100 * news[i]);
    points.push_back({name,
                      {static_cast<float>(hits[i]), static_cast<float>(news[i]),
                       static_cast<float>(flags.correction_share)}});
  }
  if (!flags.mass_looks) return points;
  // Each beside its twin.
  std::vector<StepPoint> pairs;
  for (const StepPoint& point : points) {
    pairs.push_back(point);
    pairs.push_back({point.name + "+looks", point.forced});
    pairs.back().forced.looks_at_mass = true;
  }
  return pairs;
}

nlohmann::json step_line(const std::string& name, int64_t batch, const StepFigures& s,
                         const Ceilings& c) {
  return {{"kind", "point"},
          {"point", name},
          {"batch", batch},
          {"steps", s.steps},
          {"median_s", s.median_s},
          {"p10_s", s.p10_s},
          {"p90_s", s.p90_s},
          {"mean_s", s.mean_s},
          {"tokens_per_second", static_cast<double>(batch) / s.median_s},
          {"cpu_us_per_step", s.cpu_s_per_step * 1e6},
          {"cpu_us_first_tenth", s.cpu_s_first * 1e6},
          {"cpu_us_last_tenth", s.cpu_s_last * 1e6},
          {"hit_rate", s.hit_rate},
          {"new_share", s.new_share},
          {"corrections_per_step", s.corrections},
          {"weight_bytes", s.weight_bytes},
          {"code_bytes", s.code_bytes},
          {"attended_bytes", s.attended_bytes},
          {"link_bytes", s.link_bytes},
          {"gather_bytes_per_s", s.gather_bytes_per_s},
          {"hbm_floor_s", s.hbm_floor_s(c)},
          {"link_floor_s", s.link_floor_s(c)},
          {"of_floor", s.median_s / s.floor_s(c)},
          {"attention_wait_s", s.wait_s},
          {"fetch_cluster_s", s.fetch_s},
          {"graph_nodes", s.graph_nodes},
          {"resident_heads", s.resident_heads},
          {"heads", s.heads},
          {"device_used_bytes", s.device_used_bytes}};
}

void print_step(const std::string& name, int64_t batch, const StepFigures& s, const Ceilings& c) {
  std::printf("%-16s %5ld %9.3f %10.1f %8.3f %8.3f %7.2fx %7.1f%% %7.1f%% %9s %7.0f\n",
              name.c_str(), static_cast<long>(batch), s.median_s * 1e3,
              static_cast<double>(batch) / s.median_s, s.hbm_floor_s(c) * 1e3,
              s.link_floor_s(c) * 1e3, s.median_s / s.floor_s(c), 100 * s.hit_rate,
              100 * s.new_share, format_bytes(static_cast<int64_t>(s.link_bytes)).c_str(),
              s.cpu_s_per_step * 1e6);
  std::fflush(stdout);
}

Result<int> step(const StepFlags& flags) {
  CLO_ASSIGN(MeasureOptions options, resolve(flags.gpu));
  CLO_ASSIGN(const std::vector<StepPoint> points, step_points(flags, options.policy));
  options.batch = std::max(options.batch, flags.dense_batch);
  options.room_tokens =
      (static_cast<int64_t>(points.size()) + 1) * (flags.warm_up + flags.steps + 4) + 64;
  if (!flags.gpu.output.empty()) CLO_TRY(check_writable(flags.gpu.output));
  CLO_ASSIGN(const std::unique_ptr<CudaMeasure> measure, CudaMeasure::create(options));
  const Ceilings ceilings = measure->ceilings();
  print_ceilings(*measure, ceilings);
  nlohmann::json head = head_line("step", flags.gpu, *measure, ceilings);
  head["policy"] = describe(options.policy);
  head["forced_correction_share"] = flags.correction_share;
  std::string lines = head.dump() + "\n";
  std::printf("%-16s %5s %9s %10s %8s %8s %8s %8s %8s %9s %7s\n", "point", "batch", "ms/step",
              "tokens/s", "hbm ms", "link ms", "x floor", "hits", "new", "fetched", "cpu us");
  CLO_TRY(measure->fill(options.policy, flags.gpu.batch, options.context_tokens));
  int64_t used_bytes = -1;
  for (const StepPoint& point : points) {
    const StepFigures figures = measure->steps(point.forced, flags.warm_up, flags.steps);
    used_bytes = figures.device_used_bytes;
    print_step(point.name, flags.gpu.batch, figures, ceilings);
    lines += step_line(point.name, flags.gpu.batch, figures, ceilings).dump() + "\n";
  }
  if (const auto asked = flags.gpu.device_memory; asked && used_bytes >= 0) {
    std::printf("device memory by the driver's count: %s, asked for %s\n",
                format_bytes(used_bytes).c_str(), asked->c_str());
  }
  if (flags.stages) {
    std::printf("\n%-22s %10s %12s %10s %9s\n", "stage (one step)", "us", "bytes", "GB/s",
                "of hbm");
    for (const StageFigures& stage : measure->stages()) {
      const double rate = stage.bytes / stage.seconds;
      std::printf("%-22s %10.1f %12s %10.0f %8.1f%%\n", stage.name.c_str(), stage.seconds * 1e6,
                  format_bytes(static_cast<int64_t>(stage.bytes)).c_str(), rate / 1e9,
                  100 * rate / ceilings.hbm_read_bytes_per_s);
      lines += nlohmann::json{{"kind", "stage"},
                              {"stage", stage.name},
                              {"seconds", stage.seconds},
                              {"bytes", stage.bytes},
                              {"of_hbm", rate / ceilings.hbm_read_bytes_per_s}}
                   .dump() +
               "\n";
    }
  }
  if (flags.dense_batch > 0) {
    CLO_ASSIGN(const PolicyOptions dense, preset("dense"));
    CLO_TRY(measure->fill(dense, flags.dense_batch, options.context_tokens));
    const StepFigures figures = measure->steps({}, flags.warm_up, flags.steps);
    print_step("dense", flags.dense_batch, figures, ceilings);
    lines += step_line("dense", flags.dense_batch, figures, ceilings).dump() + "\n";
  }
  if (!flags.gpu.output.empty()) CLO_TRY(write_whole(flags.gpu.output, lines));
  return 0;
}

struct FetchFlags {
  GpuFlags gpu;
  std::string shares = "0.1,0.035,0.01";
};

Result<int> fetch(const FetchFlags& flags) {
  CLO_ASSIGN(MeasureOptions options, resolve(flags.gpu));
  CLO_ASSIGN(const std::vector<double> shares, parse_shares(flags.shares, "--shares"));
  options.room_tokens = 256;
  options.policy.persistent = PolicyOptions::Persistent::kPerLayer;
  options.policy.persistent_per_layer = 0;
  options.policy.set_tokens = static_cast<int64_t>(*std::max_element(shares.begin(), shares.end()) *
                                                       static_cast<double>(options.context_tokens) +
                                                   64);
  if (!flags.gpu.output.empty()) CLO_TRY(check_writable(flags.gpu.output));
  CLO_ASSIGN(const std::unique_ptr<CudaMeasure> measure, CudaMeasure::create(options));
  const Ceilings ceilings = measure->ceilings();
  print_ceilings(*measure, ceilings);
  std::string lines = head_line("fetch", flags.gpu, *measure, ceilings).dump() + "\n";
  CLO_TRY(measure->fill(options.policy, flags.gpu.batch, options.context_tokens));
  std::printf("%8s %10s %10s %12s %9s %12s %9s\n", "share", "rows", "bytes", "beside GB/s",
              "of copy", "alone GB/s", "of copy");
  for (const double share : shares) {
    const FetchFigures f = measure->fetch(share);
    const double beside = f.bytes / f.seconds, alone = f.bytes / f.idle_seconds;
    std::printf("%7.1f%% %10ld %10s %12.1f %8.1f%% %12.1f %8.1f%%\n", 100 * share,
                static_cast<long>(f.rows), format_bytes(static_cast<int64_t>(f.bytes)).c_str(),
                beside / 1e9, 100 * beside / ceilings.link_copy_bytes_per_s, alone / 1e9,
                100 * alone / ceilings.link_copy_bytes_per_s);
    lines += nlohmann::json{{"kind", "point"},
                            {"share", share},
                            {"rows", f.rows},
                            {"bytes", f.bytes},
                            {"seconds_beside_products", f.seconds},
                            {"seconds_alone", f.idle_seconds},
                            {"of_copy_beside_products", beside / ceilings.link_copy_bytes_per_s},
                            {"of_copy_alone", alone / ceilings.link_copy_bytes_per_s}}
                 .dump() +
             "\n";
  }
  if (!flags.gpu.output.empty()) CLO_TRY(write_whole(flags.gpu.output, lines));
  return 0;
}

struct PrefillFlags {
  GpuFlags gpu;
  std::optional<int64_t> chunk;
  bool timeline = false;
};

Result<int> prefill(const PrefillFlags& flags) {
  CLO_ASSIGN(MeasureOptions options, resolve(flags.gpu));
  options.room_tokens = 256;
  options.chunk_rows = flags.chunk.value_or(options.context_tokens);
  options.batch = 1;
  if (!flags.gpu.output.empty()) CLO_TRY(check_writable(flags.gpu.output));
  CLO_ASSIGN(const std::unique_ptr<CudaMeasure> measure, CudaMeasure::create(options));
  const Ceilings ceilings = measure->ceilings();
  print_ceilings(*measure, ceilings);
  CLO_ASSIGN(const PrefillFigures f, measure->prefill(options.context_tokens, flags.timeline));
  std::printf(
      "prefill of %ld tokens: %.2f s with offload, %.2f s without (%.1f %% more); pinning "
      "%.2f s apart; attention by %s\n",
      static_cast<long>(options.context_tokens), f.seconds, f.without_offload_seconds,
      100 * (f.seconds / f.without_offload_seconds - 1), measure->pin_seconds(),
      f.attention_kernel.c_str());
  nlohmann::json line = head_line("prefill", flags.gpu, *measure, ceilings);
  line["kind"] = "prefill";
  line["chunk_rows"] = options.chunk_rows;
  line["seconds"] = f.seconds;
  line["seconds_without_offload"] = f.without_offload_seconds;
  line["attention_kernel"] = f.attention_kernel;
  for (const PrefillSpan& span : f.spans) {
    line["timeline"].push_back({{"lane", span.lane},
                                {"work", span.work},
                                {"layer", span.layer},
                                {"begin_s", span.begin_s},
                                {"end_s", span.end_s}});
  }
  if (!flags.gpu.output.empty()) CLO_TRY(write_whole(flags.gpu.output, line.dump() + "\n"));
  return 0;
}

}  // namespace

void add_gpu_benches(CLI::App& app, std::vector<BenchCommand>& commands) {
  {
    CLI::App* sub = app.add_subcommand("step", "A decode step on a GPU beside its floor");
    auto flags = std::make_shared<StepFlags>();
    add_common(*sub, flags->gpu);
    sub->add_option("--force-hit-rate", flags->hit_rates,
                    "Shares of heads that keep their set, such as 1,0.7: forced, in pairs with");
    sub->add_option("--force-new-share", flags->new_shares,
                    "shares of a missed set that are new, such as 0,0.35");
    add_value(*sub, "--force-correction-share", flags->correction_share,
              "Share of the misses that the true query finds, on the critical path (0)");
    add_value(*sub, "--steps", flags->steps, "Timed steps of each point (200)");
    add_value(*sub, "--warm-up", flags->warm_up, "Steps before them (20)");
    add_value(*sub, "--dense-batch", flags->dense_batch,
              "Also dense, with this many sequences (0: not)");
    sub->add_flag("--stages", flags->stages, "Each stage of a step alone");
    sub->add_flag("--mass-looks", flags->mass_looks,
                  "Each point again with the samples of attention mass that --quality takes");
    commands.push_back({sub, [flags] { return step(*flags); }});
  }
  {
    CLI::App* sub = app.add_subcommand("fetch", "Rows from pinned memory through the refresh path");
    auto flags = std::make_shared<FetchFlags>();
    add_common(*sub, flags->gpu);
    sub->add_option("--shares", flags->shares, "Of the context, per head (0.1,0.035,0.01)");
    commands.push_back({sub, [flags] { return fetch(*flags); }});
  }
  {
    CLI::App* sub =
        app.add_subcommand("prefill", "Time to read a prompt, with and without offload");
    auto flags = std::make_shared<PrefillFlags>();
    add_common(*sub, flags->gpu);
    add_value(*sub, "--chunk", flags->chunk, "Tokens of a prefill step (the whole prompt)");
    sub->add_flag("--timeline", flags->timeline,
                  "One more prefill whose layers are timed on the device (bench/plot draws it)");
    commands.push_back({sub, [flags] { return prefill(*flags); }});
  }
}

}  // namespace clo::app
