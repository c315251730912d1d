#pragma once
// SplitMix64 (Steele, Lea and Flood, 2014): one word of state, the same numbers on every machine.
#include <cstdint>

namespace clo {

inline uint64_t split_mix(uint64_t& state) {
  state += 0x9E3779B97F4A7C15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace clo
