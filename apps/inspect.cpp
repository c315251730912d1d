// clo inspect: what a model is and what it will take, before anything is allocated.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <set>

#include "base/thread_pool.h"
#include "base/try.h"
#include "base/units.h"
#include "commands.h"
#include "device/device_facts.h"
#include "engine/backend.h"
#include "engine/checks.h"
#include "engine/memory.h"
#include "flags.h"
#include "io/generation_config.h"
#include "io/model_config.h"
#include "io/model_files.h"
#include "io/refusal.h"
#include "io/tensor_files.h"
#include "model/weights.h"
#include "profile/profile_file.h"
#include "profile_views.h"
#include "reference/cpu_ops.h"
#include "terminal.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text_files.h"

namespace clo::app {

namespace {

struct InspectFlags {
  EngineFlags engine;
  PolicyFlags policy;
  PlanFlags plan;
  int32_t batch = 1;
  bool keep_prefixes = false;
  std::string token_ids, plot;
  bool heads = false;
};

void line(const char* name, const std::string& value) {
  std::printf("  %-18s%s\n", name, value.c_str());
}

std::string ids_text(const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) text += (text.empty() ? "" : ", ") + std::to_string(id);
  return text.empty() ? "none" : text;
}

// Accounts for every tensor and names what the model does not use.
void print_tensors(const ModelConfig& config, const TensorFiles& files) {
  std::set<std::string> expected;
  for (const auto& [name, shape] : expected_tensors(config)) expected.insert(name);
  std::vector<std::string> unused;
  for (const std::string& name : files.names()) {
    if (!expected.contains(name)) unused.push_back(in_quotes(name));
  }
  line("tensors", std::to_string(expected.size()) + " of " + std::to_string(expected.size()) +
                      " found in " + std::to_string(files.files().size()) +
                      (files.files().size() == 1 ? " file, " : " files, ") +
                      format_bytes(files.total_bytes()));
  if (!unused.empty()) {
    line("not used", std::to_string(unused.size()) + " (" + listed(unused, 3) + ")");
  }
  std::vector<std::string> others;
  for (const std::string& name : files.files_not_read()) others.push_back(in_quotes(name));
  if (!others.empty()) line("files not read", listed(others, 3));
}

std::string describe_profile(const std::string& path, const HeadProfile& profile) {
  std::string held;
  for (const auto& [name, present] : {std::pair{"importance", !profile.importance.empty()},
                                      {"difficulty", !profile.difficulty.empty()},
                                      {"hash weights", !profile.hash_weights.empty()}}) {
    if (present) held += (held.empty() ? ": " : ", ") + std::string(name);
  }
  if (profile.hash_tokens > 0) {
    held += ", trained on contexts of up to " + std::to_string(profile.hash_tokens) + " tokens";
  }
  return path + (held.empty() ? ": holds nothing that is used" : held);
}

void print_plan(const MemoryPlan& plan) {
  std::printf("\n  %-18s %-8s %12s   %s\n", "memory plan", "where", "bytes", "changed by");
  for (const PlanRow& row : plan.rows) {
    std::printf("  %-18s %-8s %12s   %s\n", row.name.c_str(), row.place.c_str(),
                format_bytes(row.bytes).c_str(), row.flag.c_str());
  }
  std::printf("  %-18s %-8s %12s\n", "total", "device", format_bytes(plan.device_bytes).c_str());
  std::printf("  %-18s %-8s %12s\n\n", "total", "host", format_bytes(plan.host_bytes).c_str());
}

std::string version_text(int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void print_devices(const EngineOptions& options, const BackendChoice& choice) {
  const int threads =
      options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  line("cpu", CpuOps(threads).description());
  const auto facts = device_facts();
  if (!facts) {
    line("gpu", "none: " + facts.error().message);
  } else {
    line("gpu", facts->name + ", compute capability " + std::to_string(facts->capability_major) +
                    "." + std::to_string(facts->capability_minor) + ", " +
                    std::to_string(facts->num_multiprocessors) + " multiprocessors, " +
                    format_bytes(facts->free_memory_bytes) + " of " +
                    format_bytes(facts->memory_bytes) + " free; driver for CUDA " +
                    version_text(facts->driver_version) + ", built with " +
                    version_text(facts->runtime_version));
    for (const DeviceFeature& feature : facts->features) {
      line("", feature.name + ": " + (feature.present ? "yes, " : "no, ") + feature.reason);
    }
  }
  line("backend", std::string(choice.backend == Backend::kCuda ? "cuda" : "cpu") +
                      (choice.note.empty() ? "" : "; " + choice.note));
}

// The ids of a text as `clo run --raw` takes it, and nothing else.
Result<int> print_token_ids(const std::string& path, const Tokenizer& tokenizer) {
  CLO_ASSIGN(const std::string text, read_text(path));
  CLO_ASSIGN(const auto ids, tokenizer.encode(text, {.add_special_tokens = true}));
  for (const TokenId id : ids) std::printf("%d\n", id);
  return 0;
}

Result<int> inspect(const InspectFlags& flags) {
  CLO_ASSIGN(EngineOptions options, flags.engine.resolve());
  CLO_ASSIGN(options.policy, flags.policy.resolve());
  if (flags.batch < 1 || flags.batch > 512) {
    return Error{ErrorCode::kBadFlag, "expected 1 to 512, found " + std::to_string(flags.batch),
                 "--batch"};
  }
  options.max_batch = flags.batch;
  options.keep_prefixes = flags.keep_prefixes || flags.batch > 1;
  CLO_TRY(check_options(options));
  CLO_ASSIGN(const ModelFiles model, ModelFiles::find(options.model_dir));
  const std::filesystem::path& dir = model.path();
  CLO_ASSIGN(const ModelConfig config, model.config());
  CLO_TRY(check_context(options, config));
  CLO_ASSIGN(const GenerationConfig generation, load_generation_config(dir, config));
  CLO_ASSIGN(const TensorFiles files, TensorFiles::open(model));
  CLO_TRY(check_tensors(config, files));
  CLO_ASSIGN(const Tokenizer tokenizer, Tokenizer::load(model));
  CLO_TRY(check_vocabulary(tokenizer, config, dir));
  if (!flags.token_ids.empty()) return print_token_ids(flags.token_ids, tokenizer);
  CLO_ASSIGN(const auto chat_template, ChatTemplate::load(model));
  CLO_ASSIGN(const BackendChoice choice, choose_backend(config, options));
  options.backend = choice.backend;
  const KvShape shape = kv_shape(config, options);
  options.policy = for_backend(options.policy, options.backend);
  std::unique_ptr<CudaBackend> cuda;  // opened, to count what its context holds
  if (choice.backend == Backend::kCuda) {
    CLO_ASSIGN(cuda, CudaBackend::create(options.threads));
  }
  options.prefill_chunk = resolve_prefill_chunk(config, options, shape, cuda.get());
  CLO_ASSIGN(PlanInput input, plan_input(config, options));
  if (cuda) {
    input.device_overhead_bytes =
        cuda->overhead_bytes() + CudaBackend::mapping_bytes(sketch_memory(input).host_bytes);
  }
  CLO_TRY(check_policy(options.policy, input.shape));
  std::optional<Profile> profile;
  if (!options.profile.empty()) {
    CLO_ASSIGN(const HeadProfile used, load_profile(options.profile, config, options.code_bits));
    CLO_ASSIGN(profile, load_whole_profile(options.profile, config));
  } else if (flags.heads || !flags.plot.empty() || flags.plan.budget) {
    return Error{ErrorCode::kBadFlag, "need --profile, whose figures they show",
                 "--heads, --plot and --budget"};
  }
  if (!flags.plot.empty()) CLO_TRY(check_writable(flags.plot + "-difficulty.svg"));

  std::cout << bold(dir.string()) << '\n' << std::flush;
  line("architecture", config.architecture + ", " + std::to_string(config.num_layers) +
                           " layers, hidden " + std::to_string(config.hidden_size) + ", FFN " +
                           std::to_string(config.intermediate_size) +
                           (config.tie_word_embeddings ? ", tied head" : ", own head"));
  line("attention",
       std::to_string(config.num_q_heads) + " query heads, " + std::to_string(config.num_kv_heads) +
           " KV heads, head_dim " + std::to_string(config.head_dim) +
           (config.attention_bias ? ", QKV bias" : "") + (config.qk_norm ? ", QK-norm" : ""));
  line("context", std::to_string(config.max_positions) + " tokens" +
                      (config.sliding_window == 0
                           ? ""
                           : ", a sliding window of " + std::to_string(config.sliding_window) +
                                 ": served up to there"));
  line("rope", describe_rope(config.rope));
  print_tensors(config, files);
  line("tokenizer", tokenizer.description());
  line("chat template", chat_template ? "yes" : "none: prompts are taken as they are");
  line("end of sequence", ids_text(generation.eos_ids));
  line("profile id", model_fingerprint(config));
  if (profile) line("profile", describe_profile(options.profile, profile->heads));
  print_devices(options, choice);

  std::string rows(kv_type_name(input.shape));
  if (input.shape.compressed()) {
    rows += ", sink and recent rows in " + std::string(dtype_name(input.shape.type));
  }
  std::printf("\n  %s\n  for %lld sequence(s) of %lld tokens, %s per token of KV (%s)\n",
              describe(options.policy).c_str(), static_cast<long long>(input.batch),
              static_cast<long long>(input.context_tokens),
              format_bytes(input.shape.token_bytes()).c_str(), rows.c_str());
  const MemoryPlan plan = sketch_memory(input);
  print_plan(plan);
  const int64_t free_bytes = available_host_bytes();
  int64_t needed = 0;
  for (const PlanRow& row : plan.rows) needed += row.bytes;
  line("system memory", format_bytes(free_bytes) +
                            " free for this process (limits of its control "
                            "group counted), " +
                            format_bytes(needed) + " needed");
  if (needed > free_bytes) {
    return Error{ErrorCode::kHostMemory,
                 "the plan needs " + format_bytes(needed) + " of system memory, " +
                     format_bytes(free_bytes) + " is free; lower --context, --batch or --kv-ratio",
                 "memory plan"};
  }
  CLO_TRY(plan_memory(input));
  if (!profile) return 0;
  print_statistics(*profile, shape, flags.heads);
  if (!flags.plot.empty()) CLO_TRY(write_heat_maps(*profile, shape, flags.plot));
  if (profile->statistics.measured() && options.policy.select != Select::kNone) {
    CLO_TRY(flags.plan.print(*profile, shape, options.policy, input.context_tokens));
  }
  return 0;
}

}  // namespace

Command add_inspect(CLI::App& app) {
  auto flags = std::make_shared<InspectFlags>();
  flags->engine.add_to(app);
  add_value(app, "--batch", flags->batch, "Sequences at once (1)");
  app.add_flag(
      "--keep-prefixes", flags->keep_prefixes,
      "Plan for prompts kept for later ones, as run with several questions or --chat does");
  add_value(app, "--token-ids", flags->token_ids,
            "Print the token ids of a text file instead, one a line, as run --raw takes it")
      ->type_name("FILE");
  app.add_flag("--heads", flags->heads,
               "Figures of the profile for every KV head, not every layer");
  add_value(app, "--plot", flags->plot,
            "Heat maps of the profile as PREFIX-FIGURE.svg and .png, layer by head")
      ->type_name("PREFIX");
  flags->plan.add_to(app);
  flags->policy.add_to(app);
  app.footer(
      "Nothing is loaded or allocated, but a GPU is opened to see what that takes. Exit status 4 "
      "when the plan does not fit.\n\n" +
      presets_help());
  return [flags] { return inspect(*flags); };
}

}  // namespace clo::app
