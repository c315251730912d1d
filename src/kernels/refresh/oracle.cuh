#pragma once
// Keys of the other selections, as words of which the smallest win: exact (an oracle: it reads
// every key twice, from the host if need be), random (a control), and sets drawn for a measurement.
#include <cstdint>

#include "kernels/key_scores.cuh"
#include "kernels/refresh/decide.cuh"
#include "kernels/refresh/threshold.cuh"
#include "kernels/refresh/worker.cuh"

namespace clo::kernels {

// ---- exact ------------------------------------------------------------------------------------

inline constexpr int kRowsAtOnce = 4;  // keys a warp has under way

// Scores of up to kRowsAtOnce candidates from `token` on, in every lane: visit(row, g, score).
// shared.query holds the queries times scale.
template <int kElements, typename Visit>
__device__ __forceinline__ void score_keys(const DecodeTables& t, int32_t token, int32_t count,
                                           const Visit& visit) {
  score_rows<kElements, kRowsAtOnce>(
      t.shape, shared.work.device_rows != nullptr, shared.query, count,
      [&](int r) { return source_row(t, token + r); }, visit);
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

// 32 draws: a bit is set with a probability of share / 2^kDrawBits. From the least significant bit
// of the share on, each random word halves what is there and adds a half where the bit is set.
inline constexpr int kDrawBits = 14;
__device__ __forceinline__ uint32_t draw_bits(const uint32_t (&random)[kDrawBits], uint32_t share) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kDrawBits; ++i) {
    bits = (share >> i & 1u) != 0 ? bits | random[i] : bits & random[i];
  }
  return bits;
}
__device__ __forceinline__ uint32_t draw_share(float share) {
  return static_cast<uint32_t>(fminf(fmaxf(share, 0.0f), 1.0f) * ((1 << kDrawBits) - 1) + 0.5f);
}

// Measurement only: replaces the distances of the selection by 0 for held tokens that stay, 1 for
// tokens that may come and 2 for the rest, so that a given share of the held tokens is replaced by
// tokens from all over the context. Word by word: the selection that it stands beside takes 30
// instructions a token, and what is measured is that.
__device__ __noinline__ Threshold drawn_threshold(const DecodeTables& t) {
  uint16_t* distances = shared.scratch.distances();
  const int64_t index = table_index(t, shared.work.slot, shared.work.layer, shared.work.kv_head);
  const float share = t.slots[shared.work.slot].rules.forced_new_share;
  const auto seed = static_cast<uint32_t>(mix_bits(
      static_cast<uint64_t>(index) << 32 ^ static_cast<uint64_t>(shared.work.context_tokens)));
  // Newcomers for the share that is expected to leave and a little more; taken in token order until
  // the set is full.
  const auto num_candidates = static_cast<float>(shared.candidates.end - shared.candidates.first);
  const auto num_held = static_cast<float>(shared.head.num_slots_used);
  const float wanted = static_cast<float>(shared.candidates.num_select) - num_held * (1 - share);
  const float chance = (1.03f * fmaxf(wanted, 0.0f) + 8) / fmaxf(num_candidates - num_held, 1.0f);
  const uint32_t leaves = draw_share(share),
                 comes = min(draw_share(chance) + 1, (1u << kDrawBits) - 1);

  cluster_sync();  // the selection's histogram has been read
  clear_histogram(3);
  uint32_t counts[3] = {0, 0, 0};
  for (int32_t token = shared.candidates.slice_begin + 32 * static_cast<int32_t>(threadIdx.x);
       token < shared.candidates.slice_end; token += 32 * kRefreshThreads) {
    const uint32_t mask = shared.candidates.mask(token);
    if (mask == 0) continue;
    const uint32_t held =
        token < shared.head.held_tokens ? __ldcg(shared.head.held + token / 32) : 0;
    uint32_t random[kDrawBits];
#pragma unroll
    for (int i = 0; i < kDrawBits; ++i) {
      uint32_t x = seed + 0x9E3779B9u * static_cast<uint32_t>(token + i);
      x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
      x = (x ^ (x >> 13)) * 0xC2B2AE35u;
      random[i] = x ^ (x >> 16);
    }
    const uint32_t stay = held & ~draw_bits(random, leaves);
    const uint32_t come = ~held & draw_bits(random, comes), rest = ~(stay | come);
    counts[0] += __popc(stay & mask);
    counts[1] += __popc(come & mask);
    counts[2] += __popc(rest & mask);
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      uint32_t pair[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t two_come = come >> (i + 2 * k), two_rest = rest >> (i + 2 * k);
        pair[k] =
            (two_come & 1u) | (two_come & 2u) << 15 | (two_rest & 1u) << 1 | (two_rest & 2u) << 16;
      }
      *reinterpret_cast<uint4*>(distances + token + i) = uint4{pair[0], pair[1], pair[2], pair[3]};
    }
  }
#pragma unroll
  for (int bin = 0; bin < 3; ++bin) atomicAdd(&shared.histogram[bin], counts[bin]);
  find_threshold(3, static_cast<uint32_t>(shared.candidates.num_select));
  return {shared.threshold_bin, ties_here()};
}

}  // namespace clo::kernels
