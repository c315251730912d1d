#include "base/check.h"
#include "kernels/element.cuh"
#include "kernels/launch.cuh"
#include "kernels/refresh/decide.cuh"
#include "kernels/refresh/difficulty.h"

namespace clo::kernels {

namespace {

constexpr int kDifficultyWarps = 8;

// A block for each head, a warp for each pair of queries.
template <typename Element, int kElements>
__global__ void __launch_bounds__(32 * kDifficultyWarps)
    prompt_difficulty_kernel(const __grid_constant__ PromptDifficulty p) {
  constexpr int kHeadDim = 32 * kElements;
  __shared__ float queries[kDifficultyWarps][kMaxGroup * kHeadDim];
  __shared__ uint32_t misses[kDifficultyWarps];
  launch_dependents();
  wait_for_predecessor();
  const DecodeTables& t = p.tables;
  const auto kv_head = static_cast<int32_t>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = group_size(t.shape);
  const HeadRule& rule = t.rules[table_index(t, p.slot, p.layer, kv_head)];
  const bool aggregate_all = t.slots[p.slot].rules.aggregate_all;
  const auto* elements =
      static_cast<const uint16_t*>(p.queries) + static_cast<int64_t>(kv_head) * group * kHeadDim;
  const int64_t stride = int64_t{t.shape.num_q_heads} * kHeadDim;
  uint32_t missed = 0;
  for (int32_t i = warp; i < p.count; i += kDifficultyWarps) {
    const uint16_t* now = elements + (p.rows - p.count + i) * stride;
    HeadLabel<kElements> label;
#pragma unroll
    for (int g = 0; g < kMaxGroup; ++g) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (g >= group) continue;
        const int at = (g * kElements + e) * 32 + lane;
        queries[warp][at] = Element::value(now[at]);
        label.value[g][e] = Element::value((now - stride)[at]);
      }
    }
    __syncwarp();
    const GroupCosines cosines = group_cosines(queries[warp], label, group, lane);
    missed += similar_enough(rule.at_once, rule, aggregate_all, cosines.with_label, group) ? 0 : 1;
    __syncwarp();  // the queries have been read
  }
  if (lane == 0) misses[warp] = missed;
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t total = 0;
  for (const uint32_t of_warp : misses) total += of_warp;
  p.misses[kv_head] = total;
}

}  // namespace

void prompt_difficulty(const PromptDifficulty& params, cudaStream_t stream) {
  const KvShape& shape = params.tables.shape;
  CLO_CHECK(params.count >= 1 && params.count < params.rows, params.count, params.rows);
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  CLO_CHECK(shape.group_size() >= 1 && shape.group_size() <= kMaxGroup, shape.group_size());
  with_element(shape.type, [&]<typename Element>(Element) {
    launch(shape.head_dim == 64 ? prompt_difficulty_kernel<Element, 2>
                                : prompt_difficulty_kernel<Element, 4>,
           dim3(static_cast<unsigned>(shape.num_kv_heads)), dim3(32 * kDifficultyWarps), 0, stream,
           params);
  });
}

}  // namespace clo::kernels
