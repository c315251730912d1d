#pragma once
// A small deterministic generator for evaluation items: the same seed gives the same item on every
// machine and standard library.
#include <cstdint>

#include "base/split_mix.h"

namespace clo {

class ItemRandom {
 public:
  explicit ItemRandom(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 0x5851F42D4C957F2Du) {}

  uint64_t next() { return split_mix(state_); }
  // Uniform in [0, bound). Requires: bound > 0. The bias is below 2^-40 for the bounds used here.
  uint64_t below(uint64_t bound) { return next() % bound; }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace clo
