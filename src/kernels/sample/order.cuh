#pragma once
// Candidates as integers: ascending order is the sampler's (score down, then id up), and all are
// different, so that minimum, threshold and sort need no rule for ties.
#include <cstdint>

namespace clo::kernels {

using Order = unsigned long long;

__device__ __forceinline__ Order order_of(float score, int32_t id) {
  const uint32_t bits = __float_as_uint(score == 0 ? 0.0f : score);  // -0 ties with 0
  const uint32_t ascending = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return Order{~ascending} << 32 | static_cast<uint32_t>(id);
}
__device__ __forceinline__ float score_of(Order order) {
  const uint32_t ascending = ~static_cast<uint32_t>(order >> 32);
  return __uint_as_float(ascending >> 31 != 0 ? ascending & 0x7FFFFFFFu : ~ascending);
}
__device__ __forceinline__ int32_t id_of(Order order) { return static_cast<int32_t>(order); }

// Scratch keeps complements, so that zero is "nothing yet" and the best is the maximum. All ones is
// out of reach of a finite score.
inline constexpr Order kNotFinite = ~Order{0};
__device__ __forceinline__ Order packed(Order order) { return ~order; }

}  // namespace clo::kernels
