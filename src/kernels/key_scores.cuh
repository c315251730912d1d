#pragma once
// Exact scores of single rows' keys, wherever the rows lie: a warp for a few rows at once, as many
// reads under way as registers allow. For what reads keys seldom: oracle selection, samples of the
// attention mass.
#include <cstdint>

#include "kernels/decode_tables.h"
#include "kernels/element.cuh"
#include "kernels/rows/stored_rows.cuh"

namespace clo::kernels {

// A softmax's denominator so far.
struct SoftmaxSum {
  float best;  // largest score
  float sum;   // of exp(score - best)
};
__device__ __forceinline__ void add_score(SoftmaxSum& total, float best, float sum) {
  const float largest = fmaxf(total.best, best);
  const float kept = total.best == -INFINITY ? 0.0f : total.sum * __expf(total.best - largest);
  const float added = best == -INFINITY ? 0.0f : sum * __expf(best - largest);
  total = {largest, kept + added};
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  }
  return value;
}

// Scores of rows [0, min(count, kRows)) by each query of the group, in every lane:
// visit(row, g, score). row_of(row): where it lies. full: rows are full ones whatever the store
// keeps. query [group_size][head_dim] in shared memory, times the scale.
template <int kElements, int kRows, typename RowOf, typename Visit>
__device__ __forceinline__ void score_rows(const KvShape& shape, bool full, const float* query,
                                           int32_t count, const RowOf& row_of, const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = shape.num_q_heads / shape.num_kv_heads;
  const bool is_f16 = shape.type == DType::kF16;
  // Two elements each: of a full row, or two codes.
  full = full || shape.stored == RowFormat::kFull;
  const bool is_fp8 = shape.stored == RowFormat::kFp8;
  uint32_t key[kRows][kElements / 2];
  float scale[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < count) {
      const std::byte* row = row_of(r);
#pragma unroll
      for (int e = 0; e < kElements / 2; ++e) {
        key[r][e] = full ? reinterpret_cast<const uint32_t*>(row)[e * 32 + lane]
                         : reinterpret_cast<const uint16_t*>(row)[e * 32 + lane];
      }
      scale[r] = full || is_fp8 ? 1.0f : *reinterpret_cast<const float*>(row + 2 * shape.head_dim);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
#pragma unroll 1
    for (int g = 0; g < group; ++g) {
      const float* of_query = query + g * 32 * kElements;
      float sum = 0;
#pragma unroll
      for (int e = 0; e < kElements / 2; ++e) {
        const float2 q = *reinterpret_cast<const float2*>(of_query + (e * 32 + lane) * 2);
        float2 k;
        if (full) {
          k = is_f16 ? F16::unpack(key[r][e]) : Bf16::unpack(key[r][e]);
        } else if (is_fp8) {
          k = fp8_values(key[r][e]);
        } else {
          k.x = static_cast<float>(static_cast<int8_t>(key[r][e] & 0xFFu)) * scale[r];
          k.y = static_cast<float>(static_cast<int8_t>(key[r][e] >> 8)) * scale[r];
        }
        sum += q.x * k.x + q.y * k.y;
      }
      visit(r, g, warp_sum(sum));
    }
  }
}

}  // namespace clo::kernels
