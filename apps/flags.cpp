#include "flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>

#include "base/try.h"
#include "base/units.h"

namespace clo::app {

namespace {

Error bad_flag(const char* flag, const std::string& expected, const std::string& found) {
  return Error{ErrorCode::kBadFlag, "expected " + expected + ", found \"" + found + "\"", flag};
}

// Sets `target` to the value that stands beside the given name.
template <typename T>
Status choose(const char* flag, const std::optional<std::string>& given,
              std::initializer_list<std::pair<const char*, T>> choices, T& target) {
  if (!given) return Ok{};
  std::string names;
  for (const auto& [name, value] : choices) {
    if (*given == name) {
      target = value;
      return Ok{};
    }
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return bad_flag(flag, "one of " + names, *given);
}

Result<int64_t> parse_number(const char* flag, const std::string& text) {
  int64_t value = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc() || end != text.data() + text.size()) {
    return bad_flag(flag, "a whole number", text);
  }
  return value;
}

Status parse_persistent(const std::string& text, PolicyOptions& policy) {
  using Persistent = PolicyOptions::Persistent;
  if (text == "fill" || text == "all") {
    policy.persistent = text == "fill" ? Persistent::kFillBudget : Persistent::kAll;
    return Ok{};
  }
  if (text.find(':') == std::string::npos) {
    CLO_ASSIGN(const int64_t count, parse_number("--persistent-heads", text));
    policy.persistent = Persistent::kPerLayer;
    policy.persistent_per_layer = static_cast<int32_t>(std::clamp<int64_t>(count, -1, 1 << 20));
    return Ok{};
  }
  policy.persistent = Persistent::kList;
  policy.persistent_heads.clear();
  for (const std::string& item : split_list(text)) {
    const size_t colon = item.find(':');
    if (colon == std::string::npos) {
      return bad_flag("--persistent-heads", "LAYER:HEAD pairs", item);
    }
    CLO_ASSIGN(const int64_t layer, parse_number("--persistent-heads", item.substr(0, colon)));
    CLO_ASSIGN(const int64_t head, parse_number("--persistent-heads", item.substr(colon + 1)));
    policy.persistent_heads.emplace_back(static_cast<int32_t>(layer), static_cast<int32_t>(head));
  }
  return Ok{};
}

}  // namespace

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> items;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    items.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return items;
}

Result<std::vector<int64_t>> parse_numbers(const std::string& text, const char* flag) {
  std::vector<int64_t> numbers;
  for (const std::string& item : split_list(text)) {
    CLO_ASSIGN(const int64_t value, parse_number(flag, item));
    if (value < 1) return bad_flag(flag, "numbers of at least 1", item);
    numbers.push_back(value);
  }
  return numbers;
}

PolicyOptions widest(const std::vector<PolicyOptions>& policies) {
  // Sets that cover everything need more than dense rows do: rows of the ring are held twice.
  const auto need = [](const PolicyOptions& p) {
    const bool evicts =
        p.select != Select::kNone && p.persistent != PolicyOptions::Persistent::kAll;
    return evicts ? p.kv_ratio : 0;
  };
  return *std::max_element(
      policies.begin(), policies.end(),
      [&](const PolicyOptions& a, const PolicyOptions& b) { return need(a) < need(b); });
}

Status in_range(const char* flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Ok{};
  return Error{ErrorCode::kBadFlag,
               "expected " + std::to_string(low) + " to " + std::to_string(high) + ", found " +
                   std::to_string(value),
               flag};
}

std::string presets_help() {
  std::string text = "Presets (each is these flags; a flag given beside it wins):\n";
  for (const std::string& name : preset_names()) {
    text += "  " + name + ": " +
            describe(*preset(name)).substr(std::string("--preset ").size() + name.size() + 1) +
            "\n";
  }
  return text +
         "clo-paper has no label age, as published: a token that has left the recent window is "
         "seen again only\nonce its head misses.\n";
}

void PolicyFlags::add_to(CLI::App& app, bool with_preset) {
  const std::string group = "Policy: which token rows are attended, kept and fetched";
  const auto add = [&](const char* name, auto& target, const char* help) {
    add_value(app, name, target, help)->group(group);
  };
  if (with_preset)
    add("--preset", preset, "Named set of the flags below: default, clo-paper, hata, dense");
  add("--kv-ratio", kv_ratio, "Set size as a share of the context (0.1); at least 256 tokens");
  add("--set-tokens", set_tokens, "Set size in tokens; wins over --kv-ratio");
  add("--select", select,
      "What chooses a set: graded-hash, hash, exact (an oracle), random (a control), none (dense)");
  add("--threshold", threshold, "Cosine at which a set is kept; above 1: never, -1: always");
  add("--eta", eta, "Threshold of the most important head (0.9); others follow by importance");
  add("--importance-exponent", importance_exponent, "Shape of that dependence (0.5)");
  add("--aggregate", aggregate, "How a group's query heads decide: mean, weighted, all");
  add("--persistent-heads", persistent_heads,
      "Heads with all rows on the device: fill (the budget), all, N per layer, or LAYER:HEAD,...");
  add("--predict", predict,
      "Query that chooses: auto (none on the CPU; on a GPU previous-step, corrected), none (the "
      "true one), previous-layer, previous-step");
  add("--correction", correction,
      "Check a prediction against the true query: auto (where --predict is auto), none, "
      "true_query");
  add("--prefetch-margin", prefetch_margin,
      "How much earlier a corrected prediction chooses again: 0 (as the check) to 1 (0.5)");
  add("--hit-test", hit_test, "What keeps a set: cosine, cosine+drift, cosine+entropy");
  add("--entropy-rise", entropy_rise,
      "With cosine+entropy: nats that the set's attention may have become flatter by (1)");
  add("--drift-limit", drift_limit,
      "With cosine+drift: nats that a typical key's score may have moved by (1)");
  add("--quality", quality,
      "Share of the attention mass to keep, such as 0.99: set sizes, thresholds and label age then "
      "follow samples of it");
  add("--fetch", fetch, "On a miss move only new rows or the whole set: delta, whole");
  add("--max-label-age", max_label_age, "Steps a set may be kept (64), or none");
  add("--sink", sink, "First tokens, always attended (4)");
  add("--recent", recent, "Latest tokens, always attended (64)");
  add("--dense-layers", dense_layers, "First layers that attend to everything (0), or all");
}

Result<PolicyOptions> PolicyFlags::resolve() const { return resolve(preset.value_or("default")); }

Status PolicyFlags::refuse_with_dense(std::string_view base) const {
  const bool by_select = select && *select == "none";
  if (!by_select && (base != "dense" || select)) return Ok{};
  for (const auto& [given, flag] : {std::pair{kv_ratio.has_value(), "--kv-ratio"},
                                    {set_tokens.has_value(), "--set-tokens"},
                                    {threshold.has_value(), "--threshold"},
                                    {eta.has_value(), "--eta"},
                                    {importance_exponent.has_value(), "--importance-exponent"},
                                    {aggregate.has_value(), "--aggregate"},
                                    {persistent_heads.has_value(), "--persistent-heads"},
                                    {predict.has_value(), "--predict"},
                                    {correction.has_value(), "--correction"},
                                    {prefetch_margin.has_value(), "--prefetch-margin"},
                                    {fetch.has_value(), "--fetch"},
                                    {hit_test.has_value(), "--hit-test"},
                                    {entropy_rise.has_value(), "--entropy-rise"},
                                    {drift_limit.has_value(), "--drift-limit"},
                                    {quality.has_value(), "--quality"},
                                    {max_label_age.has_value(), "--max-label-age"},
                                    {sink.has_value(), "--sink"},
                                    {recent.has_value(), "--recent"},
                                    {dense_layers.has_value(), "--dense-layers"}}) {
    if (!given) continue;
    return Error{ErrorCode::kBadFlag,
                 "contradict each other: dense attends to every row and selects nothing",
                 std::string(by_select ? "--select none" : "--preset dense") + " and " + flag};
  }
  return Ok{};
}

Result<PolicyOptions> PolicyFlags::resolve(std::string_view base) const {
  if (threshold && (eta || importance_exponent)) {
    return Error{
        ErrorCode::kBadFlag,
        "contradict each other: a plain threshold replaces the one made from eta; drop one",
        std::string("--threshold and ") + (eta ? "--eta" : "--importance-exponent")};
  }
  CLO_ASSIGN(PolicyOptions policy, clo::preset(base));
  CLO_TRY(refuse_with_dense(base));
  if (kv_ratio) policy.kv_ratio = *kv_ratio;
  if (set_tokens) {
    if (*set_tokens < 1) {
      return bad_flag("--set-tokens", "at least 1 token", std::to_string(*set_tokens));
    }
    policy.set_tokens = *set_tokens;
  }
  if (threshold) policy.threshold = threshold;
  if (eta || importance_exponent) policy.threshold.reset();
  if (eta) policy.eta = *eta;
  if (importance_exponent) policy.importance_exponent = *importance_exponent;
  if (prefetch_margin) policy.prefetch_margin = *prefetch_margin;
  if (sink) policy.sink = *sink;
  if (recent) policy.recent = *recent;
  CLO_TRY(choose<Select>("--select", select,
                         {{"hash", Select::kHash},
                          {"graded-hash", Select::kGradedHash},
                          {"exact", Select::kExact},
                          {"random", Select::kRandom},
                          {"none", Select::kNone}},
                         policy.select));
  CLO_TRY(choose<Aggregate>(
      "--aggregate", aggregate,
      {{"mean", Aggregate::kMean}, {"weighted", Aggregate::kWeighted}, {"all", Aggregate::kAll}},
      policy.aggregate));
  CLO_TRY(choose<Predict>("--predict", predict,
                          {{"auto", Predict::kAuto},
                           {"none", Predict::kNone},
                           {"previous-layer", Predict::kPreviousLayer},
                           {"previous-step", Predict::kPreviousStep}},
                          policy.predict));
  CLO_TRY(choose<Correction>("--correction", correction,
                             {{"auto", Correction::kAuto},
                              {"none", Correction::kNone},
                              {"true_query", Correction::kTrueQuery}},
                             policy.correction));
  CLO_TRY(choose<Fetch>("--fetch", fetch, {{"delta", Fetch::kDelta}, {"whole", Fetch::kWhole}},
                        policy.fetch));
  CLO_TRY(choose<HitTest>("--hit-test", hit_test,
                          {{"cosine", HitTest::kCosine},
                           {"cosine+entropy", HitTest::kEntropy},
                           {"cosine+drift", HitTest::kDrift}},
                          policy.hit_test));
  for (const auto& [given, flag, test, word, target] :
       {std::tuple{entropy_rise, "--entropy-rise", HitTest::kEntropy, "cosine+entropy",
                   &policy.entropy_rise},
        std::tuple{drift_limit, "--drift-limit", HitTest::kDrift, "cosine+drift",
                   &policy.drift_limit}}) {
    if (!given) continue;
    if (policy.hit_test != test) {
      return Error{ErrorCode::kBadFlag,
                   std::string("says nothing without --hit-test ") + word + "; add it", flag};
    }
    *target = *given;
  }
  if (quality) policy.quality = quality;
  const auto number_or = [](const char* flag, const std::optional<std::string>& given,
                            const char* word, int64_t value_of_word, int32_t& target) -> Status {
    if (!given) return Ok{};
    if (*given == word) {
      target = static_cast<int32_t>(value_of_word);
      return Ok{};
    }
    CLO_ASSIGN(const int64_t value, parse_number(flag, *given));
    if (value < 0 || value > (1 << 20)) {
      return bad_flag(flag, "0 to 1048576 or " + std::string(word), *given);
    }
    target = static_cast<int32_t>(value);
    return Ok{};
  };
  CLO_TRY(number_or("--max-label-age", max_label_age, "none", 0, policy.max_label_age));
  CLO_TRY(number_or("--dense-layers", dense_layers, "all", -1, policy.dense_layers));
  if (persistent_heads) CLO_TRY(parse_persistent(*persistent_heads, policy));
  CLO_TRY(validate(policy));
  return policy;
}

void EngineFlags::add_to(CLI::App& app, bool with_context) {
  add_value(app, "-m,--model", model,
            "Model: a Hugging Face directory (safetensors), a hub cache folder, or a GGUF file")
      ->required()
      ->type_name("FOLDER");
  const auto add = [&](const char* name, auto& target, const char* help) {
    return add_value(app, name, target, help)->group("Machine");
  };
  add("--backend", backend, "auto (a GPU where one is there), cpu or cuda");
  add("--threads", threads, "CPU threads (all cores)");
  add("--dtype", dtype, "KV, products and plain weights: auto (as the files), f32, bf16, f16");
  add("--kv-type", kv_type,
      "K and V rows: auto (as --dtype), f32, bf16, f16, or all but sink and recent ones in int8, "
      "fp8 (cpu)");
  add("--weights", weights,
      "Weights in memory: auto (quantised files stay so on the CPU), bf16, f32, int8, q4");
  add("--device-memory,--gpu-memory", device_memory,
      "Device budget, such as 24GiB; what is left over keeps heads persistent")
      ->type_name("SIZE");
  add("--host-memory", host_memory, "Budget of the host store, such as 64GiB")->type_name("SIZE");
  if (with_context) add("--context", context, "Longest context in tokens (the model's limit)");
  add("--prefill-chunk", prefill_chunk,
      "Prompt tokens per prefill step (cpu 512; cuda the whole prompt if it fits)");
  add("--bits", bits, "Bits of a key's code (128), a multiple of 64; 0: no codes");
  add("--profile", profile, "Head profile: importance, difficulty, trained hash weights")
      ->type_name("FILE");
}

Result<WeightStorage> weight_storage_of(const std::optional<std::string>& name) {
  WeightStorage storage = WeightStorage::kAuto;
  CLO_TRY(choose<WeightStorage>("--weights", name,
                                {{"auto", WeightStorage::kAuto},
                                 {"f32", WeightStorage::kF32},
                                 {"bf16", WeightStorage::kBF16},
                                 {"f16", WeightStorage::kF16},
                                 {"int8", WeightStorage::kInt8},
                                 {"q4", WeightStorage::kQ4}},
                                storage));
  return storage;
}

Result<Backend> backend_of(const std::string& name) {
  Backend backend = Backend::kAuto;
  CLO_TRY(choose<Backend>(
      "--backend", name,
      {{"auto", Backend::kAuto}, {"cpu", Backend::kCpu}, {"cuda", Backend::kCuda}}, backend));
  return backend;
}

Result<EngineOptions> EngineFlags::resolve() const {
  EngineOptions options;
  options.model_dir = model;
  CLO_TRY(choose<WeightType>("--dtype", dtype,
                             {{"auto", WeightType::kAuto},
                              {"f32", WeightType::kF32},
                              {"bf16", WeightType::kBF16},
                              {"f16", WeightType::kF16}},
                             options.dtype));
  CLO_TRY(choose<KvType>("--kv-type", kv_type,
                         {{"auto", KvType::kAuto},
                          {"f32", KvType::kF32},
                          {"bf16", KvType::kBF16},
                          {"f16", KvType::kF16},
                          {"int8", KvType::kInt8},
                          {"fp8", KvType::kFp8}},
                         options.kv_type));
  CLO_ASSIGN(options.weights, weight_storage_of(weights));
  CLO_ASSIGN(options.backend, backend_of(backend));
  const auto size = [](const char* flag, const std::optional<std::string>& text,
                       int64_t& target) -> Status {
    if (!text) return Ok{};
    auto bytes = parse_size(*text);
    if (!bytes) return Error{ErrorCode::kBadFlag, bytes.error().message, flag};
    if (*bytes == 0) return bad_flag(flag, "a size above 0", *text);
    target = *bytes;
    return Ok{};
  };
  CLO_TRY(size("--device-memory", device_memory, options.device_memory_bytes));
  CLO_TRY(size("--host-memory", host_memory, options.host_memory_bytes));
  options.threads = threads;
  if (context && *context < 1) {
    return bad_flag("--context", "at least 1 token", std::to_string(*context));
  }
  options.max_context_tokens = context.value_or(0);
  if (prefill_chunk && *prefill_chunk == 0) {
    return bad_flag("--prefill-chunk", "16 to 1048576 tokens", "0");
  }
  if (prefill_chunk) options.prefill_chunk = *prefill_chunk;
  if (bits) options.code_bits = *bits;
  options.profile = profile;
  return options;
}

}  // namespace clo::app
