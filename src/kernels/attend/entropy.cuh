#pragma once
// HitTest::kEntropy: what a step's attention says of how flat a head's weights have become since
// its set was new. Device mirror of Attention::note_entropy.
#include "kernels/refresh/decide.cuh"

namespace clo::kernels {

// Notes a head's min-entropy. A next step that was to keep its set, by the query's direction, is
// due for another after all where the entropy has risen too far. Executed by a whole warp, whose
// last lane then queues what is due. min_entropy: lane j's of query j. Requires: the head has a
// set, and nothing is pending for it. Apart from attention's own code: few steps take this way.
__device__ __noinline__ void note_entropy(const DecodeTables& t, int32_t slot, int32_t layer,
                                          int32_t kv_head, int32_t context, float min_entropy) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = t.shape.num_q_heads / t.shape.num_kv_heads;
  const int64_t index = table_index(t, slot, layer, kv_head);
  const SequenceRules& rules = t.slots[slot].rules;
  const HeadCacheView& head = t.heads[index];
  HeadEntropy& entropy = t.entropies[index];
  // The first step after a prompt speaks for the set that the prompt's end has chosen.
  const long long label = __ldcg(reinterpret_cast<const long long*>(&head.state->label_length));
  const bool is_new = label == context || isnan(__ldcg(&entropy.at_label[0]));
  __syncwarp();  // all lanes have looked
  float rise = 0;
  if (lane < group) {
    entropy.last[lane] = min_entropy;
    if (is_new) {
      entropy.at_label[lane] = min_entropy;
    } else {
      rise = min_entropy - __ldcg(&entropy.at_label[lane]);
    }
  }
  // Where decisions are drawn they stand.
  if ((__ldcg(t.decided + index) & kKeptAhead) == 0 || rules.forced_hit_rate >= 0) return;
  if (!entropy_rose(t.rules[index], rules.entropy_rise_ahead, rise, group) || lane != 31) return;
  t.decided[index] = kDueAhead;
  DeviceCounters& counters = t.counters[static_cast<int64_t>(slot) * t.shape.num_layers + layer];
  if (head.resident != nullptr) {
    atomicAdd(&counters.resident_selections, 1ull);
    return;
  }
  // It was counted as a hit.
  const auto kept = static_cast<unsigned long long>(__ldcg(&head.state->num_set_tokens));
  atomicAdd(&counters.hits, 0ull - 1);
  atomicAdd(&counters.rows_saved_by_hits, 0ull - kept);
  atomicAdd(&counters.misses, 1ull);
}

}  // namespace clo::kernels
