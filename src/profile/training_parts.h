#pragma once
// What both recipes of trained projections use. Inside this room only.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/split_mix.h"

namespace clo::training {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() { return split_mix(state_); }
  int64_t below(int64_t count) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(count));
  }
  // Standard normal (Box and Muller).
  float normal() {
    const double u = (static_cast<double>(next() >> 11) + 1) * 0x1p-53;
    const double v = static_cast<double>(next() >> 11) * 0x1p-53;
    return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v));
  }

 private:
  uint64_t state_;
};

// The relaxed sign of factor x, in place, and its slope by factor x from its value. It is tanh by a
// rational function that meets +-1 with slope 0 at 3, within 0.025 of it: what a compiler makes a
// vector loop of. 2 sigmoid(2x) - 1 is tanh(x).
inline void relax(std::vector<float>& x, float factor) {
  for (float& value : x) {
    const float c = std::min(std::max(factor * value, -3.0f), 3.0f);
    const float square = c * c;
    value = c * (27 + square) / (27 + 9 * square);
  }
}
inline float slope(float relaxed) { return 1 - relaxed * relaxed; }

inline constexpr int64_t kQueries = 16;     // steps of a batch; products want multiples of 16
inline constexpr int64_t kMostKeys = 1008;  // of a batch; rows of 4,032 bytes do not alias

}  // namespace clo::training
