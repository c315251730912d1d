#pragma once
// What both recipes of trained projections use. Inside this room only.
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/split_mix.h"
#include "ops/hash_loss.h"

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

// The relaxed sign of factor x, in place. 2 sigmoid(2x) - 1 is tanh(x).
inline void relax(std::vector<float>& x, float factor) {
  for (float& value : x) value = relaxed_sign(factor * value);
}

inline constexpr int64_t kQueries = kBatchQueries;
inline constexpr int64_t kMostKeys = kMostBatchKeys;

}  // namespace clo::training
