#pragma once
// Flags that several subcommands share: where the model is, what memory it may use, and the policy.
// Flags are parsed here and nowhere else.
#include <CLI/App.hpp>
#include <optional>
#include <string>
#include <vector>

#include "clo/engine.h"

namespace clo::app {

// An option that was given on the command line, or nothing.
struct PolicyFlags {
  std::optional<std::string> preset, select, aggregate, predict, correction, fetch, persistent_heads,
      max_label_age, dense_layers;
  std::optional<double> kv_ratio, threshold, eta, importance_exponent;
  std::optional<int64_t> set_tokens;
  std::optional<int32_t> sink, recent;

  void add_to(CLI::App& app, bool with_preset = true);
  // The preset (or `base`) with the given flags over it. Fails: kBadFlag.
  Result<PolicyOptions> resolve() const;
  Result<PolicyOptions> resolve(std::string_view base) const;
};

struct EngineFlags {
  std::string model;
  std::string dtype = "auto";
  std::string backend = "auto";
  std::optional<std::string> device_memory, host_memory;
  int32_t threads = 0;
  int64_t context = 0;
  int32_t prefill_chunk = 0;
  std::optional<int32_t> bits;
  std::string profile;

  void add_to(CLI::App& app, bool with_context = true);
  // Fails: kBadFlag.
  Result<EngineOptions> resolve() const;
};

// "4096,16384" as numbers. Fails: kBadFlag.
Result<std::vector<int64_t>> parse_numbers(const std::string& text, const char* flag);
std::vector<std::string> split_list(const std::string& text);

// One table of what each preset sets, for --help.
std::string presets_help();

}  // namespace clo::app
