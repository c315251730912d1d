#pragma once
// From logits to a token. Greedy is a true argmax with the lowest id on ties; sampling draws from
// a counter-based generator keyed by (seed, position), so an answer depends on its seed and not
// on what else runs, and nothing is re-seeded.
#include <cstdint>
#include <span>
#include <vector>

#include "clo/engine.h"

namespace clo {

// Fails: kBadFlag for values out of range.
Status validate(const SamplingOptions& options);

// Uniform in [0, 1): Philox 4x32-10 (Salmon et al., 2011) on key `seed`, counter `position`.
double philox_uniform(uint64_t seed, uint64_t position);

// Whether every logit is finite. A row that is not fails its request, and no other.
bool all_finite(std::span<const float> logits);

class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options) : options_(options) {}

  const SamplingOptions& options() const { return options_; }

  // `answer`: the tokens generated so far, for the repetition penalty. Filters in the order of
  // the Hugging Face library: penalty, temperature, top-k, top-p, min-p.
  // Requires: all_finite(logits), not empty.
  int32_t sample(std::span<const float> logits, std::span<const int32_t> answer);

 private:
  SamplingOptions options_;
  std::vector<float> scores_;
  std::vector<int32_t> order_;
};

}  // namespace clo
