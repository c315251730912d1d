#include "io/rope.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>

#include "base/check.h"

namespace clo {

namespace {

constexpr double kTwoPi = 2 * std::numbers::pi;

std::string setting(const char* name, double value) {
  char text[64];
  std::snprintf(text, sizeof text, ", %s %.12g", name, value);
  return text;
}

// theta^(2i / head_dim), rounded to f32 as an f32 power of an f32 exponent is.
float period(double theta, int64_t pair, int64_t head_dim) {
  const float exponent = static_cast<float>(2 * pair) / static_cast<float>(head_dim);
  return static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
}

float llama3_frequency(const RopeConfig& rope, float frequency) {
  const auto original = static_cast<float>(rope.original_max_positions);
  const auto factor = static_cast<float>(rope.factor);
  const auto low = static_cast<float>(rope.low_freq_factor);
  const float wavelength = (1.0f / frequency) * static_cast<float>(kTwoPi);
  const auto longest =
      static_cast<float>(static_cast<double>(rope.original_max_positions) / rope.low_freq_factor);
  const auto shortest =
      static_cast<float>(static_cast<double>(rope.original_max_positions) / rope.high_freq_factor);
  if (wavelength > longest) return frequency / factor;
  if (wavelength < shortest) return frequency;
  const auto width = static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  const float smooth = ((1.0f / wavelength) * original - low) / width;
  return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

// The pair (as a real number of dimensions) that makes `rotations` turns in the original context.
double yarn_dimension(const RopeConfig& rope, double rotations, int64_t head_dim) {
  const auto original = static_cast<double>(rope.original_max_positions);
  return static_cast<double>(head_dim) * std::log(original / (rotations * kTwoPi)) /
         (2 * std::log(rope.theta));
}

std::vector<float> yarn_frequencies(const RopeConfig& rope, int64_t head_dim) {
  double first = yarn_dimension(rope, rope.beta_fast, head_dim);
  double last = yarn_dimension(rope, rope.beta_slow, head_dim);
  if (rope.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  // The bound is head_dim - 1, not head_dim / 2 - 1: as in transformers and the paper's code.
  last = std::min(last, static_cast<double>(head_dim - 1));
  if (first == last) last += 0.001;

  std::vector<float> frequencies(static_cast<size_t>(head_dim / 2));
  for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
    const float kept_period = period(rope.theta, pair, head_dim);
    const float kept = 1.0f / kept_period;
    const float stretched = 1.0f / (static_cast<float>(rope.factor) * kept_period);
    const float ramp =
        (static_cast<float>(pair) - static_cast<float>(first)) / static_cast<float>(last - first);
    const float keep = 1.0f - std::clamp(ramp, 0.0f, 1.0f);
    frequencies[static_cast<size_t>(pair)] = stretched * (1.0f - keep) + kept * keep;
  }
  return frequencies;
}

}  // namespace

std::string describe_rope(const RopeConfig& rope) {
  const std::string theta = setting("theta", rope.theta);
  const std::string factor = setting("factor", rope.factor);
  const std::string original =
      setting("original positions", static_cast<double>(rope.original_max_positions));
  switch (rope.kind) {
    case RopeConfig::Kind::kDefault:
      return "default" + theta;
    case RopeConfig::Kind::kLinear:
      return "linear" + theta + factor;
    case RopeConfig::Kind::kLlama3:
      return "llama3" + theta + factor + setting("low_freq_factor", rope.low_freq_factor) +
             setting("high_freq_factor", rope.high_freq_factor) + original;
    case RopeConfig::Kind::kYarn:
      return "yarn" + theta + factor + original + setting("beta_fast", rope.beta_fast) +
             setting("beta_slow", rope.beta_slow) +
             setting("attention_factor", rope.attention_factor) +
             (rope.truncate ? "" : ", not truncated");
    case RopeConfig::Kind::kFactors:
      return "factors of the file" + theta +
             setting("largest", static_cast<double>(
                                    *std::max_element(rope.factors.begin(), rope.factors.end())));
  }
  return "";
}

std::vector<float> rope_inverse_frequencies(const RopeConfig& rope, int64_t head_dim) {
  CLO_CHECK(head_dim > 0 && head_dim % 2 == 0, head_dim);
  if (rope.kind == RopeConfig::Kind::kYarn) return yarn_frequencies(rope, head_dim);
  std::vector<float> frequencies(static_cast<size_t>(head_dim / 2));
  for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
    float frequency = 1.0f / period(rope.theta, pair, head_dim);
    if (rope.kind == RopeConfig::Kind::kLinear) frequency /= static_cast<float>(rope.factor);
    if (rope.kind == RopeConfig::Kind::kLlama3) frequency = llama3_frequency(rope, frequency);
    if (rope.kind == RopeConfig::Kind::kFactors) {
      CLO_CHECK(std::ssize(rope.factors) == head_dim / 2, rope.factors.size(), head_dim);
      frequency /= rope.factors[static_cast<size_t>(pair)];
    }
    frequencies[static_cast<size_t>(pair)] = frequency;
  }
  return frequencies;
}

}  // namespace clo
