#pragma once
// QK-norm and rotation of one head, by one warp: the arithmetic of
// reference/cpu_ops (rotate) operation by operation, without contraction. Only the norm's sum (a
// tree here) and its root differ, so results without QK-norm are the CPU's bit for bit.
//
// Elements lie strided over the warp as in encode.cuh: x[e] is element e * 32 + lane, so the two
// elements that a rotation pairs are in the same lane.
#include <cstdint>

namespace clo::kernels {

// weight: the lane's norm weights.
template <int kElements>
__device__ __forceinline__ void norm_head(float (&x)[kElements], const float (&weight)[kElements],
                                          float epsilon) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < kElements; ++e) sum = __fadd_rn(sum, __fmul_rn(x[e], x[e]));
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, offset));
  }
  // The CPU's 1 / sqrt is two roundings, this one within 2 ulp of it and without the calls that
  // exact division and root make. The head's width is a power of two: its reciprocal is exact.
  const float scale = rsqrtf(__fadd_rn(__fmul_rn(sum, 1.0f / (32 * kElements)), epsilon));
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = __fmul_rn(__fmul_rn(x[e], scale), weight[e]);
}

// cosine, sine: the lane's, of elements e * 32 + lane below half the head.
template <int kElements>
__device__ __forceinline__ void rotate_head(float (&x)[kElements],
                                            const float (&cosine)[kElements / 2],
                                            const float (&sine)[kElements / 2]) {
  constexpr int kHalf = kElements / 2;
#pragma unroll
  for (int e = 0; e < kHalf; ++e) {
    const float a = x[e], b = x[e + kHalf];
    x[e] = __fsub_rn(__fmul_rn(a, cosine[e]), __fmul_rn(b, sine[e]));
    x[e + kHalf] = __fadd_rn(__fmul_rn(b, cosine[e]), __fmul_rn(a, sine[e]));
  }
}

template <int kCount>
__device__ __forceinline__ void load_strided(float (&x)[kCount], const float* source, int lane) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) x[e] = source[e * 32 + lane];
}

}  // namespace clo::kernels
