#pragma once
// Rotary position embedding: the settings in force for a model and the frequencies they give.
// Position p rotates pair i of a head by the angle p * f[i]; cos and sin are multiplied by
// attention_factor. Definitions follow transformers 5 (modeling_rope_utils): "default", "linear",
// "llama3" and "yarn" (arXiv 2309.00071); factors by pair come from GGUF files. Plain values; safe
// from any thread.
#include <cstdint>
#include <string>
#include <vector>

namespace clo {

struct RopeConfig {
  enum class Kind { kDefault, kLinear, kLlama3, kYarn, kFactors };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  double factor = 1;  // all kinds but the default
  // llama3: wavelengths above original / low are divided by factor, below original / high kept.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_positions = 0;  // llama3 and yarn: the context of pre-training
  // yarn: rotations within that context between which the frequencies are blended.
  double beta_fast = 32;
  double beta_slow = 1;
  double attention_factor = 1;  // 1 unless yarn
  bool truncate = true;         // yarn: the blended range is widened to whole pairs
  std::vector<float> factors;   // kFactors: [head_dim / 2], what each frequency is divided by

  bool operator==(const RopeConfig&) const = default;
};

// The settings in force in one line, such as "llama3, theta 500000, factor 8, ...".
std::string describe_rope(const RopeConfig& rope);

// Inverse frequencies f [head_dim / 2]. Powers and logarithms are taken in double; results are
// rounded to f32 wherever transformers rounds, so both agree to the last bits of f32.
// Requires: head_dim is even and positive; `rope` came from a reader of this room or is valid.
std::vector<float> rope_inverse_frequencies(const RopeConfig& rope, int64_t head_dim);

}  // namespace clo
