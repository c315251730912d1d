#pragma once
// The arithmetic of one training step of a hash projection, element by element, for host and
// device: both trainers do the same with the same numbers, and differ in the order of sums alone.
// docs/profile.md has the recipe.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"

namespace clo {

inline constexpr int kBatchQueries = 16;         // steps of a batch; products want multiples of 16
inline constexpr int kMostBatchKeys = 1008;      // of a batch; rows of 4,032 bytes do not alias
inline constexpr float kBoundarySharpness = 15;  // in shares of all bits

// The sign of x, relaxed, and its slope by x from its value. It is tanh by a rational function that
// meets +-1 with slope 0 at 3, within 0.025 of it: what a compiler makes a vector loop of.
CLO_HOST_DEVICE float relaxed_sign(float x) {
  const float above = x < -3.0f ? -3.0f : x;
  const float c = 3.0f < above ? 3.0f : above;
  const float square = c * c;
  return c * (27 + square) / (27 + 9 * square);
}
CLO_HOST_DEVICE float relaxed_slope(float relaxed) { return 1 - relaxed * relaxed; }

// How hard a key is pulled to its side of the boundary: the slope of log(1 + exp(-z)) without its
// sign. z > 0 on the right side; `unit` is 1 / bits.
CLO_HOST_DEVICE float boundary_pull(float score, float boundary, bool wanted, float unit) {
  const float side = wanted ? 1.0f : -1.0f;
  const float z = side * kBoundarySharpness * unit * (score - boundary);
  return 1 / (1 + std::exp(30.0f < z ? 30.0f : z));
}

// Orders floats as whole numbers: a < b exactly when ordered_bits(a) < ordered_bits(b), but that
// -0 lies below 0. Never 0 for a number.
CLO_HOST_DEVICE uint32_t ordered_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
CLO_HOST_DEVICE float from_ordered_bits(uint32_t ordered) {
  const uint32_t bits = (ordered & 0x80000000u) != 0 ? ordered & 0x7FFFFFFFu : ~ordered;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// One step of Adam (Kingma and Ba, 2015). decay1 and decay2: 0.9 and 0.999 to the power of the
// steps with this one.
struct AdamStep {
  float rate = 0, decay1 = 1, decay2 = 1;
};
CLO_HOST_DEVICE void adam_update(const AdamStep& step, float gradient, float& weight, float& mean,
                                 float& square) {
  mean = 0.9f * mean + 0.1f * gradient;
  square = 0.999f * square + 0.001f * gradient * gradient;
  weight -=
      step.rate * (mean / (1 - step.decay1)) / (std::sqrt(square / (1 - step.decay2)) + 1e-12f);
}
// The step after `last`, of `iterations` in all: the rate falls from 0.01 to 0 along a cosine.
inline AdamStep adam_step(const AdamStep& last, int32_t iteration, int32_t iterations) {
  const double done = static_cast<double>(iteration) / iterations;
  return {0.01f * static_cast<float>(0.5 * (1 + std::cos(3.141592653589793 * done))),
          last.decay1 * 0.9f, last.decay2 * 0.999f};
}

}  // namespace clo
