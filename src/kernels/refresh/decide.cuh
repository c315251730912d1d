#pragma once
// May a head keep its set? One warp decides for one head; a miss becomes a job. The device mirror
// of reuse/reuse_rule (decide, similar_enough) and of Attention::refresh's counting. Used where the
// true queries are made (rows/decode_rows.cu) and where they are foreseen (refresh.cu); attention
// (of heads whose mass is sampled, mass/mass.cu) queues what was decided for the step after it.
#include <cstdint>

#include "base/split_mix.h"
#include "kernels/decode_tables.h"
#include "kernels/launch.cuh"
#include "kernels/rules.cuh"

namespace clo::kernels {

enum class Decision : uint8_t { kHit, kMiss, kAged, kIncomplete };
// Which query asks: a foreseen one, the true one, or the true one about a set already foreseen.
enum class Cause : uint8_t { kForesee, kDecide, kCorrect };

// Measurement only: the draw in [0, 1) that stands for a head's decision at a context.
__device__ __forceinline__ float forced_draw(int64_t table_index, int64_t context_tokens) {
  const uint64_t bits = mix_bits(kSplitMixStep * (static_cast<uint64_t>(table_index) + 1) +
                                 static_cast<uint64_t>(context_tokens));
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}
// One draw for a step's head, whoever asks: kept below the hit rate; above it a miss, of which the
// true query finds the first part and the prediction the rest.
__device__ __forceinline__ bool forced_hit(const SequenceRules& rules, float draw, Cause cause) {
  const float hits = rules.forced_hit_rate;
  const float foreseen = hits + (1 - hits) * rules.forced_correction_share;
  if (cause == Cause::kDecide) return draw < hits;
  return cause == Cause::kForesee ? draw < foreseen : draw < hits || draw >= foreseen;
}

// Where a head keeps the query of a context, and that of the one before: [group_size][head_dim].
__device__ __forceinline__ uint8_t query_turn(int64_t context_tokens) {
  return static_cast<uint8_t>(context_tokens & 1);
}
__device__ __forceinline__ float* kept_query(const DecodeTables& t, int64_t table_index,
                                             uint8_t turn) {
  const int64_t width = int64_t{t.shape.num_q_heads / t.shape.num_kv_heads} * t.shape.head_dim;
  return t.kept_queries + (table_index * 2 + turn) * width;
}

// What is known of the set that a decision is about.
struct SetFacts {
  int64_t label_length = 0;
  int64_t candidates_end = 0;
  int32_t num_set_tokens = 0;
  bool has_label = false;
};
// Of the set that a job for this context brings.
__device__ __forceinline__ SetFacts facts_of_job(const SequenceRules& rules,
                                                 const HeadCacheView& head,
                                                 int64_t context_tokens) {
  SetFacts facts;
  facts.label_length = context_tokens;
  facts.candidates_end = candidates_end(rules, context_tokens);
  facts.num_set_tokens = static_cast<int32_t>(
      min(min(set_size(rules, context_tokens), facts.candidates_end - rules.sink),
          static_cast<int64_t>(head.slot_capacity)));
  facts.has_label = true;
  return facts;
}

// Label and facts of the set that a head has, or will have when the job under way is done: that job
// is for `context_tokens` and chooses with the query kept before this context's. A lane holds its
// strided elements (e * 32 + lane) of every query head's label. Executed by a whole warp.
template <int kElements>
struct HeadLabel {
  float value[kMaxGroup][kElements];
  SetFacts facts;
  bool pending = false;

  __device__ __forceinline__ void load(const DecodeTables& t, const SequenceRules& rules,
                                       int64_t index, int64_t context_tokens, int lane) {
    const HeadCacheView& head = t.heads[index];
    const int group = t.shape.num_q_heads / t.shape.num_kv_heads;
    // Lanes may see it fall at different times; both labels are the same then.
    pending = __any_sync(0xFFFFFFFFu, load_acquire(t.pending + index) != 0);
    const float* label =
        pending ? kept_query(t, index, query_turn(context_tokens - 1)) : head.label;
#pragma unroll
    for (int g = 0; g < kMaxGroup; ++g) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        // A refresh wrote it, on any multiprocessor.
        value[g][e] = g < group ? __ldcg(label + (g * kElements + e) * 32 + lane) : 0.0f;
      }
    }
    if (pending) {
      facts = facts_of_job(rules, head, context_tokens);
      return;
    }
    facts.label_length = __ldcg(reinterpret_cast<const long long*>(&head.state->label_length));
    facts.candidates_end = __ldcg(reinterpret_cast<const long long*>(&head.state->candidates_end));
    facts.num_set_tokens = __ldcg(&head.state->num_set_tokens);
    facts.has_label = __ldcg(&head.state->has_label) != 0;
  }
};

// Of lane j: the cosine of query j with its label, and with itself (1, or NaN where it is no
// direction), NaN where not finite; and how far it is from its label.
struct GroupCosines {
  float with_label = 0;
  float with_itself = 0;
  float way = 0;
};
// query [group_size][head_dim], in any memory.
template <int kElements>
__device__ __forceinline__ GroupCosines group_cosines(const float* query,
                                                      const HeadLabel<kElements>& label, int group,
                                                      int lane) {
  GroupCosines mine;
  // The sums of four query heads run side by side: this is on the way of a step.
  constexpr int kTogether = 4;
#pragma unroll
  for (int first = 0; first < kMaxGroup; first += kTogether) {
    if (first >= group) break;
    float dot[kTogether] = {}, query_norm[kTogether] = {}, label_norm[kTogether] = {};
    float way[kTogether] = {};  // squares
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j >= group) continue;
        const float q = query[((first + j) * kElements + e) * 32 + lane];
        const float l = label.value[first + j][e];
        dot[j] += q * l;
        query_norm[j] += q * q;
        label_norm[j] += l * l;
        way[j] += (q - l) * (q - l);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        dot[j] += __shfl_xor_sync(0xFFFFFFFFu, dot[j], offset);
        query_norm[j] += __shfl_xor_sync(0xFFFFFFFFu, query_norm[j], offset);
        label_norm[j] += __shfl_xor_sync(0xFFFFFFFFu, label_norm[j], offset);
        way[j] += __shfl_xor_sync(0xFFFFFFFFu, way[j], offset);
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (lane != first + j || first + j >= group) continue;
      // Roots before the product: it could underflow or overflow where they do not.
      const float root = sqrtf(query_norm[j]);
      const float cosine = dot[j] / (root * sqrtf(label_norm[j]));
      const float self = query_norm[j] / (root * root);
      mine.with_label = isfinite(cosine) ? cosine : nanf("");
      mine.with_itself = isfinite(self) ? self : nanf("");
      mine.way = sqrtf(way[j]);
    }
  }
  return mine;
}

// reuse_rule: similar_enough. cosine: lane j's of query j. The sums run in the original's order and
// without contraction, so that equal cosines give equal answers.
__device__ __forceinline__ bool similar_enough(const HeadThresholds& threshold,
                                               const HeadRule& rule, bool aggregate_all,
                                               float cosine, int group) {
  double sum = 0, weights = 0;
  for (int j = 0; j < group; ++j) {
    const float of_query = __shfl_sync(0xFFFFFFFFu, cosine, j);
    if (isnan(of_query)) return false;
    const double c = fmin(fmax(static_cast<double>(of_query), -1.0), 1.0);
    if (aggregate_all && !(c >= threshold.query[j])) return false;
    sum = __dadd_rn(sum, __dmul_rn(rule.weight[j], c));
    weights = __dadd_rn(weights, rule.weight[j]);
  }
  if (aggregate_all) return true;
  if (threshold.mean <= -1) return true;
  if (threshold.mean > 1) return false;
  if (weights == 0) return true;  // no head of the group matters
  return sum / weights >= threshold.mean;
}

// Attention::refused, of HitTest::kDrift. way: lane j's of query j.
__device__ __forceinline__ bool drifted(const HeadRule& rule, float limit, float way, int group) {
  double sum = 0, weights = 0;
  for (int j = 0; j < group; ++j) {
    const double drift = rule.drift_scale * __shfl_sync(0xFFFFFFFFu, way, j);
    sum = __dadd_rn(sum, __dmul_rn(rule.weight[j], drift));
    weights = __dadd_rn(weights, rule.weight[j]);
  }
  return weights > 0 && sum / weights > limit;
}

// Attention::refused, of HitTest::kEntropy. rise: lane j's of query j; NaN, where it is not known
// yet, is no reason to refuse.
__device__ __forceinline__ bool entropy_rose(const HeadRule& rule, float limit, float rise,
                                             int group) {
  double sum = 0, weights = 0;
  for (int j = 0; j < group; ++j) {
    const double of_query = __shfl_sync(0xFFFFFFFFu, rise, j);
    sum = __dadd_rn(sum, __dmul_rn(rule.weight[j], of_query));
    weights = __dadd_rn(weights, rule.weight[j]);
  }
  return weights > 0 && sum / weights > limit;
}
__device__ __forceinline__ float entropy_rise(const HeadEntropy& entropy, int group, int lane) {
  if (lane >= group) return 0;
  return __ldcg(&entropy.last[lane]) - __ldcg(&entropy.at_label[lane]);
}

// Decides and counts for one head and a context; executed by a whole warp, which gets one answer.
// Changes nothing but counters. cosine, way: lane j's of query j.
__device__ __forceinline__ Decision decide_head(const DecodeTables& t, int32_t slot, int32_t layer,
                                                int64_t index, const SetFacts& facts, float cosine,
                                                float way, int64_t context_tokens, Cause cause) {
  const SequenceRules& rules = t.slots[slot].rules;
  const HeadRule& rule = t.rules[index];
  const HeadCacheView& head = t.heads[index];
  const int group = t.shape.num_q_heads / t.shape.num_kv_heads;
  Decision decision;
  if (!facts.has_label) {
    decision = Decision::kMiss;
  } else if (rules.forced_hit_rate >= 0) {
    decision = forced_hit(rules, forced_draw(index, context_tokens), cause) ? Decision::kHit
                                                                            : Decision::kMiss;
  } else if (covers(rules, context_tokens) &&
             (facts.num_set_tokens < candidates_end(rules, facts.label_length) - rules.sink ||
              facts.candidates_end < context_tokens - head.ring_tokens)) {
    decision = Decision::kIncomplete;
  } else if (rules.has_dial && 4 * int64_t{facts.num_set_tokens} <
                                   3 * min(set_size(rules, context_tokens),
                                           candidates_end(rules, context_tokens) - rules.sink)) {
    decision = Decision::kIncomplete;  // only a dial makes sets grow by more than the context does
  } else if (rules.max_label_age > 0 && context_tokens - facts.label_length > rules.max_label_age) {
    decision = Decision::kAged;
  } else {
    decision = similar_enough(cause == Cause::kForesee ? rule.ahead : rule.at_once, rule,
                              rules.aggregate_all, cosine, group)
                   ? Decision::kHit
                   : Decision::kMiss;
    const float limit = cause == Cause::kForesee ? rules.drift_limit_ahead : rules.drift_limit;
    if (decision == Decision::kHit && rules.drift_limit > 0 && drifted(rule, limit, way, group)) {
      decision = Decision::kMiss;
    }
    // Of a set that nothing has attended to there is no entropy. A decision about the next step is
    // made before this step's attention, which has the last word (attend.cu).
    const bool attended =
        facts.label_length < context_tokens &&
        (cause != Cause::kForesee || rules.predict == PredictRule::kPreviousLayer);
    if (decision == Decision::kHit && rules.entropy_rise > 0 && attended) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const float rise = entropy_rise(t.entropies[index], group, lane);
      const float most = cause == Cause::kForesee ? rules.entropy_rise_ahead : rules.entropy_rise;
      if (entropy_rose(rule, most, rise, group)) decision = Decision::kMiss;
    }
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
      atomicAdd(&counters.rows_saved_by_hits,
                static_cast<unsigned long long>(facts.num_set_tokens));
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
// Requires: the head's query of `turn` is written, and nothing is pending for it: then the ring,
// which has room for every head, cannot be full.
__device__ __forceinline__ void push_job(const DecodeTables& t, int ring, int32_t slot,
                                         int32_t layer, int32_t kv_head, uint8_t turn,
                                         int64_t context_tokens) {
  __threadfence();
  t.pending[table_index(t, slot, layer, kv_head)] = 1;
  const unsigned long long position = atomicAdd(&t.queue->rings[ring].tail, 1ull);
  RefreshJob& job = t.jobs[ring * t.queue_capacity + (position & (t.queue_capacity - 1))];
  job.slot = slot;
  job.layer = static_cast<int16_t>(layer);
  job.kv_head = static_cast<uint8_t>(kv_head);
  job.query = turn;
  job.context_tokens = static_cast<int32_t>(context_tokens);
  store_release(&job.ticket, static_cast<uint32_t>(position + 1));
}

// Queues the set of the step after this context's, where the true query found it due
// (PredictRule::kPreviousStep). Executed by one thread, when nothing reads the present set any
// more.
__device__ __forceinline__ void push_due_job(const DecodeTables& t, int32_t slot, int32_t layer,
                                             int32_t kv_head, int64_t context_tokens) {
  if (t.slots[slot].rules.predict != PredictRule::kPreviousStep) return;
  if ((__ldcg(t.decided + table_index(t, slot, layer, kv_head)) & kDueAhead) == 0) return;
  push_job(t, kAhead, slot, layer, kv_head, query_turn(context_tokens), context_tokens + 1);
}

// Until nothing is pending for a head; executed by one thread. False: it gave up.
__device__ __forceinline__ bool wait_until_refreshed(const DecodeTables& t, int64_t index,
                                                     FaultCode fault) {
  const unsigned long long started = global_timer_ns();
  while (load_acquire(t.pending + index) != 0) {
    // After a fault the step is lost: every further wait would only be as long again.
    if (load_acquire(&t.queue->fault) != 0) return false;
    if (global_timer_ns() - started > kWatchdogNs) {
      atomicCAS(&t.queue->fault, uint32_t{0}, static_cast<uint32_t>(fault));
      return false;
    }
    __nanosleep(100);
  }
  return true;
}

// The decisions that a layer's true query makes: for its own attention, where nothing foresaw it or
// where it may refute what was foreseen, and, for PredictRule::kPreviousStep, for the next step. A
// miss of the first kind is queued as urgent; one of the second is noted in `decided`, for the tail
// of attention, which may be reading the rows that it replaces. Executed by a whole warp.
// Requires: `query` is in the head's kept query of this context; label as loaded at this context.
template <int kElements>
__device__ __forceinline__ void decide_with_true_query(const DecodeTables& t, int32_t slot,
                                                       int32_t layer, int32_t kv_head,
                                                       const float* query,
                                                       const HeadLabel<kElements>& label,
                                                       int64_t context_tokens) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t index = table_index(t, slot, layer, kv_head);
  const SequenceRules& rules = t.slots[slot].rules;
  const HeadCacheView& head = t.heads[index];
  const bool resident = head.resident != nullptr;
  const bool by_layer = rules.predict == PredictRule::kPreviousLayer && layer > 0;
  const bool by_step = rules.predict == PredictRule::kPreviousStep;
  // A head whose residency has changed may have no set that anything could have foreseen.
  const bool foreseen = (by_layer || by_step) && label.facts.has_label;
  const GroupCosines cosines =
      group_cosines(query, label, t.shape.num_q_heads / t.shape.num_kv_heads, lane);

  bool chosen_now = false;
  if ((!foreseen || rules.correct) && !attends_all(rules, resident, layer, context_tokens)) {
    chosen_now =
        decide_head(t, slot, layer, index, label.facts, cosines.with_label, cosines.way,
                    context_tokens, foreseen ? Cause::kCorrect : Cause::kDecide) != Decision::kHit;
    if (chosen_now && lane == 0) {
      bool ready = true;
      if (label.pending) {
        const unsigned long long start = global_timer_ns();
        ready = wait_until_refreshed(t, index, FaultCode::kRefreshStuck);
        atomicAdd(&t.counters[static_cast<int64_t>(slot) * t.shape.num_layers + layer].wait_ns,
                  global_timer_ns() - start);
      }
      if (ready) {
        push_job(t, kUrgent, slot, layer, kv_head, query_turn(context_tokens), context_tokens);
      }
    }
  }
  uint32_t ahead = 0;
  if (by_step && !attends_all(rules, resident, layer, context_tokens + 1)) {
    const SetFacts facts = chosen_now ? facts_of_job(rules, head, context_tokens) : label.facts;
    const bool hit = decide_head(t, slot, layer, index, facts,
                                 chosen_now ? cosines.with_itself : cosines.with_label,
                                 chosen_now ? 0.0f : cosines.way, context_tokens + 1,
                                 Cause::kForesee) == Decision::kHit;
    ahead = hit ? kKeptAhead : kDueAhead;
  }
  if (lane == 0) t.decided[index] = ahead | (chosen_now ? kChosenNow : 0u);
}

}  // namespace clo::kernels
