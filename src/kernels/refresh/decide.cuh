#pragma once
// May a head keep its set? One warp decides for one head; a miss becomes a job. The device mirror
// of reuse/reuse_rule (decide, similar_enough) and of Attention::refresh's counting. Used by the
// tail of attention (attend/), by decide_ahead and by refresh_now; includes nothing that they do
// not have.
#include <cstdint>

#include "kernels/decode_tables.h"
#include "kernels/launch.cuh"
#include "kernels/rules.cuh"

namespace clo::kernels {

enum class Decision : uint8_t { kHit, kMiss, kAged, kIncomplete };
// Why it is asked: for a set that no one has looked at yet, or to refute a predicted one.
enum class Cause : uint8_t { kDecide, kCorrect };

// SplitMix64's last step: a well-mixed word of `z`.
__device__ __forceinline__ uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
// Measurement only: the draw in [0, 1) that stands for a head's decision at a context.
__device__ __forceinline__ float forced_draw(int64_t table_index, int64_t context_tokens) {
  const uint64_t bits = mix_bits(0x9E3779B97F4A7C15u * (static_cast<uint64_t>(table_index) + 1) +
                                 static_cast<uint64_t>(context_tokens));
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  }
  return value;
}

// Lane j gets the cosine of query j with its label, NaN where it is not finite; other lanes 0.
// query, label [group_size][head_dim]; the label in global memory, the query anywhere. The loads
// and sums of four query heads run side by side: this is on the way of a step.
__device__ __forceinline__ float label_cosine(const float* query, const float* label, int group,
                                              int head_dim) {
  constexpr int kTogether = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float mine = 0;
  for (int first = 0; first < group; first += kTogether) {
    float dot[kTogether] = {}, query_norm[kTogether] = {}, label_norm[kTogether] = {};
#pragma unroll 2
    for (int d = lane; d < head_dim; d += 32) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j >= group) continue;
        const float q = query[(first + j) * head_dim + d];
        // An earlier refresh wrote it, on any multiprocessor.
        const float l = __ldcg(label + (first + j) * head_dim + d);
        dot[j] += q * l;
        query_norm[j] += q * q;
        label_norm[j] += l * l;
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        dot[j] += __shfl_xor_sync(0xFFFFFFFFu, dot[j], offset);
        query_norm[j] += __shfl_xor_sync(0xFFFFFFFFu, query_norm[j], offset);
        label_norm[j] += __shfl_xor_sync(0xFFFFFFFFu, label_norm[j], offset);
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      // Roots before the product: it could underflow or overflow where they do not.
      const float cosine = dot[j] / (sqrtf(query_norm[j]) * sqrtf(label_norm[j]));
      if (lane == first + j && first + j < group) mine = isfinite(cosine) ? cosine : nanf("");
    }
  }
  return mine;
}

// reuse_rule: similar_enough. cosine: lane j's of query j. The sums run in the original's order and
// without contraction, so that equal cosines give equal answers.
__device__ __forceinline__ bool similar_enough(const HeadRule& rule, bool aggregate_all,
                                               float cosine, int group) {
  double sum = 0, weights = 0;
  for (int j = 0; j < group; ++j) {
    const float of_query = __shfl_sync(0xFFFFFFFFu, cosine, j);
    if (isnan(of_query)) return false;
    const double c = fmin(fmax(static_cast<double>(of_query), -1.0), 1.0);
    if (aggregate_all && !(c >= rule.query_threshold[j])) return false;
    sum = __dadd_rn(sum, __dmul_rn(rule.weight[j], c));
    weights = __dadd_rn(weights, rule.weight[j]);
  }
  if (aggregate_all) return true;
  if (rule.threshold <= -1) return true;
  if (rule.threshold > 1) return false;
  if (weights == 0) return true;  // no head of the group matters
  return sum / weights >= rule.threshold;
}

// Decides and counts for one head; executed by a whole warp, which gets one answer. Changes nothing
// but counters. query [group_size][head_dim] in any memory, visible to the whole warp.
// Requires: nothing pending for the head (acquired), and that it does not attend everything.
__device__ __forceinline__ Decision decide_head(const DecodeTables& t, int32_t slot, int32_t layer,
                                                int32_t kv_head, const float* query,
                                                int64_t context_tokens, Cause cause) {
  const int64_t index = table_index(t, slot, layer, kv_head);
  const SequenceRules& rules = t.slots[slot].rules;
  const HeadCacheView& head = t.heads[index];
  const int group = t.shape.num_q_heads / t.shape.num_kv_heads;
  const float cosine = label_cosine(query, head.label, group, t.shape.head_dim);

  // What an earlier refresh wrote, on whichever multiprocessor.
  const int64_t label_length =
      __ldcg(reinterpret_cast<const long long*>(&head.state->label_length));
  const int64_t chosen_end =
      __ldcg(reinterpret_cast<const long long*>(&head.state->candidates_end));
  const int32_t num_set_tokens = __ldcg(&head.state->num_set_tokens);
  const bool has_label = __ldcg(&head.state->has_label) != 0;
  const bool took_all = num_set_tokens >= candidates_end(rules, label_length) - rules.sink;

  Decision decision;
  if (!has_label) {
    decision = Decision::kMiss;
  } else if (rules.forced_hit_rate >= 0) {
    // One draw for a step's head: its prediction is then never refuted.
    const bool hit =
        cause == Cause::kCorrect || forced_draw(index, context_tokens) < rules.forced_hit_rate;
    decision = hit ? Decision::kHit : Decision::kMiss;
  } else if (covers(rules, context_tokens) &&
             (!took_all || chosen_end < context_tokens - head.ring_tokens)) {
    decision = Decision::kIncomplete;
  } else if (rules.max_label_age > 0 && context_tokens - label_length > rules.max_label_age) {
    decision = Decision::kAged;
  } else {
    decision = similar_enough(t.rules[index], rules.aggregate_all, cosine, group) ? Decision::kHit
                                                                                  : Decision::kMiss;
  }

  if (threadIdx.x % 32 == 0) {
    DeviceCounters& counters = t.counters[static_cast<int64_t>(slot) * t.shape.num_layers + layer];
    const bool hit = decision == Decision::kHit;
    if (head.resident != nullptr) {
      if (!hit) atomicAdd(&counters.resident_selections, 1ull);
    } else if (cause == Cause::kCorrect) {
      if (!hit) atomicAdd(&counters.corrections, 1ull);
    } else if (hit) {
      atomicAdd(&counters.hits, 1ull);
      atomicAdd(&counters.rows_saved_by_hits, static_cast<unsigned long long>(num_set_tokens));
    } else {
      atomicAdd(decision == Decision::kMiss   ? &counters.misses
                : decision == Decision::kAged ? &counters.aged
                                              : &counters.incomplete,
                1ull);
    }
  }
  return decision;
}

// Queues a head's refresh; executed by one thread. What the thread has seen written (its own
// stores, those of threads it has synchronised with) is seen by whoever takes the job.
// Requires: last_query of the head is written, and nothing is pending for it: then the ring, which
// has room for every head, cannot be full.
__device__ __forceinline__ void push_job(const DecodeTables& t, int32_t slot, int32_t layer,
                                         int32_t kv_head, int64_t context_tokens) {
  __threadfence();
  t.pending[table_index(t, slot, layer, kv_head)] = 1;
  const unsigned long long position = atomicAdd(&t.queue->tail, 1ull);
  RefreshJob& job = t.jobs[position & (t.queue_capacity - 1)];
  job.slot = slot;
  job.layer = static_cast<int16_t>(layer);
  job.kv_head = static_cast<int16_t>(kv_head);
  job.context_tokens = static_cast<int32_t>(context_tokens);
  store_release(&job.ticket, static_cast<uint32_t>(position + 1));
}

// Where a head's query of the last decision is kept: [group_size][head_dim].
__device__ __forceinline__ float* last_query(const DecodeTables& t, int32_t slot, int32_t layer,
                                             int32_t kv_head) {
  const int64_t group = t.shape.num_q_heads / t.shape.num_kv_heads;
  return t.last_query +
         ((static_cast<int64_t>(slot) * t.shape.num_layers + layer) * t.shape.num_q_heads +
          kv_head * group) *
             t.shape.head_dim;
}

// Copies `count` floats, a multiple of 64 below 1,025, by one warp. Loads first, then stores: the
// compiler may not pass a load by a store, and one by one they would take as long as the attention
// itself.
__device__ __forceinline__ void keep_query(const float* query, float* kept, int count) {
  constexpr int kPieces = kMaxGroup * 128 / 2 / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float2 pieces[kPieces / 2];
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i) {
      const int at = (half * kPieces / 2 + i) * 32 + lane;
      if (2 * at < count) pieces[i] = reinterpret_cast<const float2*>(query)[at];
    }
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i) {
      const int at = (half * kPieces / 2 + i) * 32 + lane;
      if (2 * at < count) reinterpret_cast<float2*>(kept)[at] = pieces[i];
    }
  }
}

// The whole of a decision made ahead: keeps the query for the job, decides for a context of
// `context_tokens`, queues a miss. Executed by a whole warp; heads that attend everything return.
static __device__ __noinline__ void decide_and_queue(const DecodeTables& t, int32_t slot,
                                                     int32_t layer, int32_t kv_head,
                                                     const float* query, int64_t context_tokens) {
  const HeadCacheView& head = t.heads[table_index(t, slot, layer, kv_head)];
  if (attends_all(t.slots[slot].rules, head.resident != nullptr, layer, context_tokens)) return;
  keep_query(query, last_query(t, slot, layer, kv_head),
             t.shape.num_q_heads / t.shape.num_kv_heads * t.shape.head_dim);
  const Decision decision =
      decide_head(t, slot, layer, kv_head, query, context_tokens, Cause::kDecide);
  __syncwarp();
  if (decision != Decision::kHit && threadIdx.x % 32 == 0) {
    push_job(t, slot, layer, kv_head, context_tokens);
  }
}

}  // namespace clo::kernels
