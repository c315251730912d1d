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

Result<std::optional<float>> bounded(const JsonObject& json, const std::string& key, double low,
                                     double high) {
  CLO_ASSIGN(const std::optional<double> value, json.number(key));
  if (!value) return std::optional<float>();
  if (!(*value >= low && *value <= high)) {
    char range[120];
    std::snprintf(range, sizeof range, " must be between %g and %g, found %g", low, high, *value);
    return bad_file(json.where(), "\"" + key + "\"" + range);
  }
  return std::optional(static_cast<float>(*value));
}

Result<GenerationConfig> read_generation(const JsonObject& json, const ModelConfig& config) {
  GenerationConfig found;
  CLO_ASSIGN(found.eos_ids, read_token_ids(json, "eos_token_id", config.vocab_size));
  if (found.eos_ids.empty()) found.eos_ids = config.eos_ids;
  CLO_ASSIGN(found.temperature, bounded(json, "temperature", 0, 1000));
  CLO_ASSIGN(found.top_p, bounded(json, "top_p", 0, 1));
  CLO_ASSIGN(found.min_p, bounded(json, "min_p", 0, 1));
  // A penalty divides logits: zero and below have no meaning.
  CLO_ASSIGN(found.repetition_penalty, bounded(json, "repetition_penalty", 1e-3, 1000));
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
