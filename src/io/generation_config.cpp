#include "io/generation_config.h"

#include <cstdio>
#include <limits>
#include <system_error>
#include <utility>

#include "base/try.h"
#include "io/json_object.h"
#include "io/refusal.h"
#include "io/token_ids.h"

namespace clo {

namespace {

constexpr int64_t kMaxFileBytes = int64_t{1} << 20;

// From 0, which itself is allowed or not, to `high`: the ranges the sampler takes.
enum class Zero : uint8_t { kAllowed, kRefused };
Result<std::optional<float>> bounded(const JsonObject& json, const std::string& key, Zero zero,
                                     double high) {
  CLO_ASSIGN(const std::optional<double> value, json.number(key));
  if (!value) return std::optional<float>();
  // Judged as it will be used: a tiny number can become zero.
  const auto used = static_cast<float>(*value);
  if (*value < 0 || !(*value <= high) || (zero == Zero::kRefused && used == 0)) {
    char range[120];
    std::snprintf(range, sizeof range, " must be %s %g, found %g",
                  zero == Zero::kAllowed ? "between 0 and" : "above 0 and at most", high, *value);
    return bad_file(json.where(), "\"" + key + "\"" + range);
  }
  return std::optional(used);
}

Result<GenerationConfig> read_generation(const JsonObject& json, const ModelConfig& config) {
  GenerationConfig found;
  CLO_ASSIGN(found.eos_ids, read_token_ids(json, "eos_token_id", config.vocab_size));
  if (found.eos_ids.empty()) found.eos_ids = config.eos_ids;
  CLO_ASSIGN(found.temperature, bounded(json, "temperature", Zero::kAllowed, 100));
  CLO_ASSIGN(found.top_p, bounded(json, "top_p", Zero::kRefused, 1));
  CLO_ASSIGN(found.min_p, bounded(json, "min_p", Zero::kAllowed, 1));
  // A penalty divides logits: zero and below have no meaning.
  CLO_ASSIGN(found.repetition_penalty, bounded(json, "repetition_penalty", Zero::kRefused, 100));
  CLO_ASSIGN(const std::optional<int64_t> top_k, json.integer("top_k"));
  if (top_k) {
    if (*top_k < 0 || *top_k > std::numeric_limits<int32_t>::max()) {
      return bad_file(json.where(),
                      "\"top_k\" must be between 0 and 2^31 - 1, found " + std::to_string(*top_k));
    }
    found.top_k = static_cast<int32_t>(*top_k);
  }
  CLO_ASSIGN(found.do_sample, json.boolean("do_sample"));
  return found;
}

}  // namespace

Result<GenerationConfig> load_generation_config(const std::filesystem::path& model_dir,
                                                const ModelConfig& config) {
  const std::filesystem::path path = model_dir / "generation_config.json";
  std::error_code fault;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, fault))) {
    GenerationConfig absent;
    absent.eos_ids = config.eos_ids;
    return absent;
  }
  CLO_ASSIGN(const JsonObject json, JsonObject::read(path, kMaxFileBytes));
  return read_generation(json, config);
}

Result<GenerationConfig> parse_generation_config(std::string_view text, std::string where,
                                                 const ModelConfig& config) {
  CLO_ASSIGN(const JsonObject json, JsonObject::parse(text, std::move(where)));
  return read_generation(json, config);
}

}  // namespace clo
