#pragma once
// Keys of the other selections, as words of which the smallest win: exact (an oracle: it reads
// every key twice, from the host if need be), random (a control), and sets drawn for a measurement.
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/refresh/decide.cuh"
#include "kernels/refresh/threshold.cuh"
#include "kernels/refresh/worker.cuh"

namespace clo::kernels {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  }
  return value;
}

// ---- exact ------------------------------------------------------------------------------------

inline constexpr int kRowsAtOnce = 4;  // keys a warp has under way

// Scores of up to kRowsAtOnce candidates from `token` on, in every lane: visit(row, g, score).
// shared.query holds the queries times scale.
template <int kElements, typename Visit>
__device__ __forceinline__ void score_keys(const DecodeTables& t, int32_t token, int32_t count,
                                           const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32, group = group_size(t.shape);
  __nv_bfloat162 key[kRowsAtOnce][kElements / 2];
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (r < count) {
      const auto* row = reinterpret_cast<const __nv_bfloat162*>(source_row(t, token + r));
#pragma unroll
      for (int e = 0; e < kElements / 2; ++e) key[r][e] = row[e * 32 + lane];
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (r >= count) break;
#pragma unroll 1
    for (int g = 0; g < group; ++g) {
      const float* query = shared.query + g * 32 * kElements;
      float sum = 0;
#pragma unroll
      for (int e = 0; e < kElements / 2; ++e) {
        const float2 q = *reinterpret_cast<const float2*>(query + (e * 32 + lane) * 2);
        const float2 k = __bfloat1622float2(key[r][e]);
        sum += q.x * k.x + q.y * k.y;
      }
      visit(r, g, warp_sum(sum));
    }
  }
}

__device__ __forceinline__ void add_score(SoftmaxSum& total, float best, float sum) {
  const float largest = fmaxf(total.best, best);
  const float kept = total.best == -INFINITY ? 0.0f : total.sum * __expf(total.best - largest);
  const float added = best == -INFINITY ? 0.0f : sum * __expf(best - largest);
  total = {largest, kept + added};
}

// Key of a token: its attention weight among the candidates, summed over the group's queries.
template <int kElements>
__device__ __noinline__ void exact_keys(const DecodeTables& t) {
  uint32_t* keys = shared.scratch.keys;
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const int group = group_size(t.shape);
  for (int i = tid; i < group * t.shape.head_dim; i += kRefreshThreads) {
    shared.query[i] = __ldcg(shared.work.query + i) * t.scale;
  }
  if (lane < kMaxGroup) shared.softmax[warp][lane] = {-INFINITY, 0};
  __syncthreads();

  const int32_t end = shared.candidates.end_here();
  const int32_t begin = shared.candidates.begin_here() + warp * kRowsAtOnce;
  for (int32_t token = begin; token < end; token += kRefreshWarps * kRowsAtOnce) {
    score_keys<kElements>(t, token, end - token, [&](int, int g, float score) {
      // A score that is no number spoils the sum, as it does on the CPU.
      if (lane == 0) add_score(shared.softmax[warp][g], score, 1);
    });
  }
  cluster_sync();
  if (tid < group) {
    SoftmaxSum total = {-INFINITY, 0};
    for (uint32_t r = 0; r < cluster_size(); ++r) {
      for (int w = 0; w < kRefreshWarps; ++w) {
        const SoftmaxSum part = shared_of(&shared.softmax[w][tid], r)[0];
        add_score(total, part.best, part.sum);
      }
    }
    shared.softmax_total[tid] = total;
  }
  __syncthreads();

  for (int32_t token = begin; token < end; token += kRefreshWarps * kRowsAtOnce) {
    float weights[kRowsAtOnce] = {};
    score_keys<kElements>(t, token, end - token, [&](int r, int g, float score) {
      const SoftmaxSum total = shared.softmax_total[g];
      const float weight = expf(score - total.best) / total.sum;
      weights[r] += isnan(weight) ? 0.0f : weight;
    });
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      // Not negative, so its bits are in order; the largest weight is the smallest key.
      if (lane == r && token + r < end) keys[token + r] = ~__float_as_uint(weights[r]);
    }
  }
  cluster_sync();  // the other blocks have read this one's sums
}

// ---- random -----------------------------------------------------------------------------------

__device__ __noinline__ void random_keys(const DecodeTables& t) {
  uint32_t* keys = shared.scratch.keys;
  const uint64_t seed = t.slots[shared.work.slot].rules.random_seed ^
                        (static_cast<uint64_t>(shared.work.context_tokens) << 20) ^
                        (static_cast<uint64_t>(shared.work.layer) << 8) ^
                        static_cast<uint64_t>(shared.work.kv_head);
  for (int32_t token = shared.candidates.begin_here() + static_cast<int32_t>(threadIdx.x);
       token < shared.candidates.end_here(); token += kRefreshThreads) {
    const auto i = static_cast<uint64_t>(token - shared.candidates.first);
    uint64_t z = seed + 0x9E3779B97F4A7C15u * (i + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    keys[token] = ~static_cast<uint32_t>(z >> 40);
  }
}

// ---- drawn ------------------------------------------------------------------------------------

// Measurement only: replaces the distances of the selection by 0 for held tokens that stay, 1 for
// tokens that may come and 2 for the rest, so that a given share of the held tokens is replaced by
// tokens from all over the context.
__device__ __noinline__ Threshold drawn_threshold(const DecodeTables& t) {
  uint16_t* distances = shared.scratch.distances();
  const int64_t index = table_index(t, shared.work.slot, shared.work.layer, shared.work.kv_head);
  const float share = t.slots[shared.work.slot].rules.forced_new_share;
  // One draw in [0, 1) per token, from a mix of 32 bits: this runs on every token.
  const auto seed = static_cast<uint32_t>(mix_bits(
      static_cast<uint64_t>(index) << 32 ^ static_cast<uint64_t>(shared.work.context_tokens)));
  const auto draw = [&](int32_t token) {
    uint32_t x = seed + 0x9E3779B9u * static_cast<uint32_t>(token);
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return static_cast<float>((x ^ (x >> 16)) >> 8) * 0x1p-24f;
  };
  // Newcomers for the share that is expected to leave and a little more; taken in token order until
  // the set is full.
  const auto num_candidates = static_cast<float>(shared.candidates.end - shared.candidates.first);
  const auto num_held = static_cast<float>(shared.head.num_slots_used);
  const float wanted = static_cast<float>(shared.candidates.num_select) - num_held * (1 - share);
  const float chance = (1.03f * fmaxf(wanted, 0.0f) + 8) / fmaxf(num_candidates - num_held, 1.0f);

  cluster_sync();  // the selection's histogram has been read
  clear_histogram(3);
  uint32_t counts[3] = {0, 0, 0};
  for (int32_t token = shared.candidates.slice_begin + 32 * static_cast<int32_t>(threadIdx.x);
       token < shared.candidates.slice_end; token += 32 * kRefreshThreads) {
    const uint32_t mask = shared.candidates.mask(token);
    if (mask == 0) continue;
    const uint32_t word =
        token < shared.head.held_tokens ? __ldcg(shared.head.held + token / 32) : 0;
#pragma unroll 1
    for (int i = 0; i < 32; i += 2) {
      uint32_t pair = 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float drawn = draw(token + i + j);
        const bool held = (word >> (i + j) & 1u) != 0;
        const uint32_t key = held ? (drawn >= share ? 0 : 2) : (drawn < chance ? 1 : 2);
        const uint32_t counted = mask >> (i + j) & 1u;
#pragma unroll
        for (uint32_t bin = 0; bin < 3; ++bin) counts[bin] += key == bin ? counted : 0;
        pair |= key << (16 * j);
      }
      *reinterpret_cast<uint32_t*>(distances + token + i) = pair;
    }
  }
#pragma unroll
  for (int bin = 0; bin < 3; ++bin) atomicAdd(&shared.histogram[bin], counts[bin]);
  find_threshold(3, static_cast<uint32_t>(shared.candidates.num_select));
  return {shared.threshold_bin, ties_here()};
}

}  // namespace clo::kernels
