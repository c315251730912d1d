#pragma once
// A key or query is projected, and becomes its code, by one warp: bit for bit reference/encode_row,
// which says what a code is. Device code only; nothing is read or written but the projection's own
// constants.
//
// Elements lie strided over the warp: lane l holds x[e * 32 + l] in x[e]. So the butterflies of
// distance 32 and more stay inside a lane, the others are one shuffle, signs are one bit of one
// word, and a ballot of `> 0` is a word of the code as it lies in memory.
#include <cstdint>

#include "ops/params.h"

namespace clo::kernels {

// Calls take(word, value) for each 32-bit word of the code: lane l has projection 32 word + l, from
// the bias on for a key. All 32 lanes call it. Requires: hash.head_dim == hash.width == 32 *
// kElements, a multiple of 64 bits up
// to kMaxCodeBits.
template <int kElements, typename Take>
__device__ __forceinline__ void project_warp(const HashParams& hash, const float (&x)[kElements],
                                             bool is_key, int lane, const Take& take) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int num_words = hash.bits / 32;
  if (hash.weights != nullptr) {
    // Sums run in order of d with a rounded product each, as on the CPU; four words at a time keep
    // enough loads in flight.
    constexpr int kWords = 4;
    for (int first = 0; first < num_words; first += kWords) {
      float sum[kWords] = {};
      const float* bias = hash.weights + int64_t{hash.head_dim} * hash.bits + lane;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (is_key && first + w < num_words) sum[w] = __ldg(bias + (first + w) * int64_t{32});
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
#pragma unroll 8
        for (int source = 0; source < 32; ++source) {
          const float value = __shfl_sync(kAll, x[e], source);
          const float* weights =
              hash.weights + static_cast<int64_t>(e * 32 + source) * hash.bits + lane;
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            if (first + w < num_words) {
              sum[w] =
                  __fadd_rn(sum[w], __fmul_rn(value, __ldg(weights + (first + w) * int64_t{32})));
            }
          }
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (first + w < num_words) take(first + w, sum[w]);
      }
    }
    return;
  }

  const uint32_t* signs = hash.signs;
  for (int first = 0; first < num_words; first += kElements) {  // one base: kElements words
    float v[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) v[e] = x[e];
#pragma unroll
    for (int round = 0; round < 2; ++round, signs += kElements) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const uint32_t flip = (__ldg(signs + e) >> lane) << 31;
        v[e] = __uint_as_float(__float_as_uint(v[e]) ^ flip);
      }
      // The butterfly, widest first: the order is part of what a code is.
#pragma unroll
      for (int half = kElements / 2; half >= 1; half /= 2) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          if ((e & half) != 0) continue;
          const float a = v[e], b = v[e + half];
          v[e] = a + b;
          v[e + half] = a - b;
        }
      }
#pragma unroll
      for (int half = 16; half >= 1; half /= 2) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float other = __shfl_xor_sync(kAll, v[e], half);
          v[e] = other + ((lane & half) != 0 ? -v[e] : v[e]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (first + e < num_words) take(first + e, v[e]);
    }
  }
}

// Lane l returns 32-bit word l of the code (bits [32 l, 32 l + 32)), lanes past the code 0.
// Requires: as project_warp().
template <int kElements>
__device__ __forceinline__ uint32_t encode_warp(const HashParams& hash, const float (&x)[kElements],
                                                bool is_key, int lane) {
  uint32_t mine = 0;
  project_warp(hash, x, is_key, lane, [&](int word, float value) {
    const uint32_t bits = __ballot_sync(0xFFFFFFFFu, value > 0);
    if (lane == word) mine = bits;
  });
  return mine;
}

}  // namespace clo::kernels
