#pragma once
// Flags that several subcommands share: where the model is, what memory it may use, and the policy.
// Flags are parsed here and nowhere else.
#include <CLI/App.hpp>
#include <charconv>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "clo/engine.h"

namespace clo::app {

template <typename T>
struct OptionValue {
  using Type = T;
};
template <typename T>
struct OptionValue<std::optional<T>> {
  using Type = T;
};

// Adds an option that must be given once at most. A number is checked as text first: CLI11 2.1
// takes 99999999999999999999 for the largest integer and -1 for the largest unsigned one.
template <typename T>
CLI::Option* add_value(CLI::App& app, const std::string& names, T& target,
                       const std::string& help) {
  using Value = typename OptionValue<T>::Type;
  CLI::Option* option = app.add_option(names, target, help);
  if constexpr (std::is_arithmetic_v<Value>) {
    option->type_name("N")->check([](const std::string& text) {
      Value value{};
      const char* end = text.data() + text.size();
      const auto [rest, fault] = std::from_chars(text.data(), end, value);
      if (fault == std::errc() && rest == end) return std::string();
      return std::string(std::is_floating_point_v<Value> ? "expected a number"
                         : std::is_signed_v<Value>       ? "expected a whole number"
                                                   : "expected a whole number of at least 0") +
             (fault == std::errc::result_out_of_range ? " within bounds" : "") + ", found \"" +
             text + "\"";
    });
  }
  return option;
}

// An option that was given on the command line, or nothing.
struct PolicyFlags {
  std::optional<std::string> preset, select, aggregate, predict, correction, fetch,
      persistent_heads, max_label_age, dense_layers, hit_test;
  std::optional<double> kv_ratio, threshold, eta, importance_exponent, prefetch_margin, quality,
      entropy_rise, drift_limit;
  std::optional<int64_t> set_tokens;
  std::optional<int32_t> sink, recent;

  void add_to(CLI::App& app, bool with_preset = true);
  // The preset (or `base`) with the given flags over it. Fails: kBadFlag.
  Result<PolicyOptions> resolve() const;
  Result<PolicyOptions> resolve(std::string_view base) const;

 private:
  // Flags that would have no effect beside dense attention. Fails: kBadFlag.
  Status refuse_with_dense(std::string_view base) const;
};

// Of --backend. Fails: kBadFlag, naming what it may be.
Result<Backend> backend_of(const std::string& name);
// Of --weights. Fails: kBadFlag, naming what it may be.
Result<WeightStorage> weight_storage_of(const std::optional<std::string>& name);

struct EngineFlags {
  std::string model;
  std::string dtype = "auto", weights = "auto", kv_type = "auto";
  std::string backend = "auto";
  std::optional<std::string> device_memory, host_memory;
  int32_t threads = 0;
  std::optional<int64_t> context;
  std::optional<int32_t> prefill_chunk, bits;
  std::string profile;

  void add_to(CLI::App& app, bool with_context = true);
  // Fails: kBadFlag.
  Result<EngineOptions> resolve() const;
};

// Fails: kBadFlag unless low <= value <= high.
Status in_range(const char* flag, int64_t value, int64_t low, int64_t high);
// "4096,16384" as numbers. Fails: kBadFlag.
Result<std::vector<int64_t>> parse_numbers(const std::string& text, const char* flag);
std::vector<std::string> split_list(const std::string& text);

// The policy that may need most of the device. Requests carry their own policies, but the engine
// sizes its memory by the one it is loaded with. Requires: not empty.
PolicyOptions widest(const std::vector<PolicyOptions>& policies);

// One table of what each preset sets, for --help.
std::string presets_help();

}  // namespace clo::app
