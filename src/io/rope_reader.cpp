#include "io/rope_reader.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "base/try.h"
#include "io/refusal.h"

namespace clo {

namespace {

constexpr double kMaxFactor = 1e6;
constexpr double kMaxTheta = 1e15;
constexpr int64_t kMaxPositions = int64_t{1} << 31;

std::string number_text(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.12g", value);
  return text;
}

// The number under `key`, within [low, high].
Result<std::optional<double>> bounded(const JsonObject& object, const std::string& key, double low,
                                      double high) {
  CLO_ASSIGN(const std::optional<double> value, object.number(key));
  if (value && !(*value >= low && *value <= high)) {
    return bad_file(object.where(), "\"" + object.full_key(key) + "\" must be between " +
                                        number_text(low) + " and " + number_text(high) +
                                        ", found " + number_text(*value));
  }
  return value;
}

Result<double> required(const JsonObject& object, const std::string& key, double low, double high) {
  CLO_ASSIGN(const std::optional<double> value, bounded(object, key, low, high));
  if (!value) {
    return bad_file(object.where(),
                    "\"" + object.full_key(key) + "\" is missing; this scaling type needs it");
  }
  return *value;
}

Status refuse_partial_rotation(const JsonObject& object) {
  CLO_ASSIGN(const std::optional<double> part, object.number("partial_rotary_factor"));
  if (part && *part != 1) {
    return unsupported(object.where(), "\"" + object.full_key("partial_rotary_factor") + "\" is " +
                                           number_text(*part) +
                                           ": only whole heads are rotated, 1 is expected");
  }
  return Ok{};
}

struct KnownKind {
  std::string name;
  RopeConfig::Kind kind;
  std::vector<std::string> keys;  // beyond those of every kind
};

const std::vector<KnownKind>& known_kinds() {
  static const std::vector<KnownKind> kinds = {
      {"default", RopeConfig::Kind::kDefault, {}},
      {"linear", RopeConfig::Kind::kLinear, {"factor"}},
      {"llama3",
       RopeConfig::Kind::kLlama3,
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}},
      {"yarn",
       RopeConfig::Kind::kYarn,
       {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate"}}};
  return kinds;
}

Result<const KnownKind*> read_kind(const JsonObject& scaling) {
  CLO_ASSIGN(const std::optional<std::string> rope_type, scaling.text("rope_type"));
  CLO_ASSIGN(const std::optional<std::string> type, scaling.text("type"));
  if (rope_type && type && *rope_type != *type) {
    return bad_file(scaling.where(), "\"" + scaling.full_key("rope_type") + "\" is " +
                                         in_quotes(*rope_type) + " but \"type\" is " +
                                         in_quotes(*type) + ": remove one");
  }
  const std::string name = rope_type.value_or(type.value_or("default"));
  for (const KnownKind& known : known_kinds()) {
    if (known.name == name) return &known;
  }
  const std::string key = scaling.full_key(rope_type ? "rope_type" : "type");
  const std::string found = "\"" + key + "\" is " + in_quotes(name) + ": ";
  if (name == "dynamic") {
    return unsupported(scaling.where(),
                       found +
                           "its frequencies change as the text grows, which keys that are "
                           "stored rotated cannot follow; use \"yarn\" or \"linear\"");
  }
  return unsupported(scaling.where(), found + "supported are default, linear, llama3 and yarn");
}

Status refuse_unknown_keys(const JsonObject& scaling, const KnownKind& kind) {
  const std::vector<std::string> common = {"rope_type", "type", "rope_theta",
                                           "partial_rotary_factor"};
  for (const std::string& key : scaling.keys()) {
    const auto is_key = [&](const std::string& known) { return known == key; };
    if (std::any_of(common.begin(), common.end(), is_key) || !scaling.has(key)) continue;
    if (std::any_of(kind.keys.begin(), kind.keys.end(), is_key)) continue;
    return unsupported(scaling.where(),
                       in_quotes(scaling.full_key(key)) + " has no meaning for rope type \"" +
                           kind.name + "\", and it would be wrong to ignore it: remove the key " +
                           "or correct the type");
  }
  return Ok{};
}

// 1 for factors up to 1, else 0.1 scale ln(factor) + 1 (arXiv 2309.00071, equation 22).
double yarn_temperature(double factor, double scale) {
  return factor <= 1 ? 1 : 0.1 * scale * std::log(factor) + 1;
}

Status read_yarn(const JsonObject& scaling, RopeConfig& rope) {
  CLO_ASSIGN(const auto beta_fast, bounded(scaling, "beta_fast", 1e-3, kMaxFactor));
  CLO_ASSIGN(const auto beta_slow, bounded(scaling, "beta_slow", 1e-3, kMaxFactor));
  rope.beta_fast = beta_fast.value_or(32);
  rope.beta_slow = beta_slow.value_or(1);
  if (rope.beta_fast < rope.beta_slow) {
    return bad_file(scaling.where(), "\"" + scaling.full_key("beta_fast") + "\" is " +
                                         number_text(rope.beta_fast) + ", below beta_slow " +
                                         number_text(rope.beta_slow));
  }
  CLO_ASSIGN(const std::optional<bool> truncate, scaling.boolean("truncate"));
  rope.truncate = truncate.value_or(true);
  CLO_ASSIGN(const auto stated, bounded(scaling, "attention_factor", 1e-6, kMaxFactor));
  CLO_ASSIGN(const auto mscale, bounded(scaling, "mscale", 0, kMaxFactor));
  CLO_ASSIGN(const auto mscale_all_dim, bounded(scaling, "mscale_all_dim", 0, kMaxFactor));
  if (stated) {
    rope.attention_factor = *stated;
  } else if (mscale.value_or(0) != 0 && mscale_all_dim.value_or(0) != 0) {
    rope.attention_factor =
        yarn_temperature(rope.factor, *mscale) / yarn_temperature(rope.factor, *mscale_all_dim);
  } else {
    rope.attention_factor = yarn_temperature(rope.factor, 1);
  }
  return Ok{};
}

Status read_llama3(const JsonObject& scaling, RopeConfig& rope) {
  CLO_ASSIGN(rope.low_freq_factor, required(scaling, "low_freq_factor", 1e-6, kMaxFactor));
  CLO_ASSIGN(rope.high_freq_factor, required(scaling, "high_freq_factor", 1e-6, kMaxFactor));
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    return bad_file(scaling.where(), "\"" + scaling.full_key("high_freq_factor") + "\" is " +
                                         number_text(rope.high_freq_factor) +
                                         ", it must be above low_freq_factor " +
                                         number_text(rope.low_freq_factor));
  }
  return Ok{};
}

// A key outside the scaling object wins over one inside, as in transformers.
Result<int64_t> read_original_positions(const JsonObject& config, const JsonObject& scaling,
                                        int64_t max_positions) {
  const std::string key = "original_max_position_embeddings";
  const JsonObject& holder = config.has(key) ? config : scaling;
  CLO_ASSIGN(const std::optional<int64_t> value, holder.integer(key));
  if (value && (*value < 1 || *value > kMaxPositions)) {
    return bad_file(holder.where(), "\"" + holder.full_key(key) +
                                        "\" must be between 1 and 2^31, "
                                        "found " +
                                        std::to_string(*value));
  }
  return value.value_or(max_positions);
}

Result<RopeConfig> read_scaling(const JsonObject& config, const JsonObject& scaling,
                                int64_t max_positions, double theta) {
  CLO_ASSIGN(const KnownKind* const kind, read_kind(scaling));
  CLO_TRY(refuse_unknown_keys(scaling, *kind));
  CLO_TRY(refuse_partial_rotation(scaling));
  RopeConfig rope;
  rope.kind = kind->kind;
  // exp of the smallest theta: yarn divides by ln(theta).
  CLO_ASSIGN(const auto theta_inside, bounded(scaling, "rope_theta", 1.001, kMaxTheta));
  rope.theta = theta_inside.value_or(theta);
  if (rope.kind == RopeConfig::Kind::kDefault) return rope;
  CLO_ASSIGN(rope.factor, required(scaling, "factor", 1, kMaxFactor));
  if (rope.kind == RopeConfig::Kind::kLinear) return rope;
  CLO_ASSIGN(rope.original_max_positions, read_original_positions(config, scaling, max_positions));
  if (rope.kind == RopeConfig::Kind::kYarn) {
    CLO_TRY(read_yarn(scaling, rope));
  } else {
    CLO_TRY(read_llama3(scaling, rope));
  }
  return rope;
}

}  // namespace

Result<RopeConfig> read_rope(const JsonObject& config, int64_t max_positions) {
  CLO_TRY(refuse_partial_rotation(config));
  CLO_ASSIGN(const auto stated_theta, bounded(config, "rope_theta", 1.001, kMaxTheta));
  const double theta = stated_theta.value_or(10000);
  std::optional<RopeConfig> chosen;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    CLO_ASSIGN(const std::optional<JsonObject> scaling, config.object(key));
    if (!scaling || scaling->keys().empty()) continue;
    CLO_ASSIGN(const RopeConfig rope, read_scaling(config, *scaling, max_positions, theta));
    if (chosen && !(*chosen == rope)) {
      return bad_file(config.where(), "\"rope_scaling\" (" + describe_rope(*chosen) +
                                          ") and \"rope_parameters\" (" + describe_rope(rope) +
                                          ") disagree: remove one");
    }
    chosen = rope;
  }
  if (chosen) return *chosen;
  RopeConfig plain;
  plain.theta = theta;
  return plain;
}

}  // namespace clo
