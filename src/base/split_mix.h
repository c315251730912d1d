#pragma once
// SplitMix64 (Steele, Lea and Flood, 2014): one word of state, the same numbers on every machine.
// For host and device.
#include <cstdint>

#if defined(__CUDACC__)
#define CLO_MIX_INLINE __host__ __device__ __forceinline__
#else
#define CLO_MIX_INLINE inline
#endif

namespace clo {

inline constexpr uint64_t kSplitMixStep = 0x9E3779B97F4A7C15u;

// The last step: a well-mixed word of a state.
CLO_MIX_INLINE uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

inline uint64_t split_mix(uint64_t& state) {
  state += kSplitMixStep;
  return mix_bits(state);
}

}  // namespace clo
