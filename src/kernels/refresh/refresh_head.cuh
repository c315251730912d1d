#pragma once
// One head from a query to a changed head cache, by one cluster: select, difference, fetch, commit.
// The device mirror of Attention::select_and_fetch.
#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/refresh/oracle.cuh"
#include "kernels/refresh/score.cuh"
#include "kernels/refresh/set_change.cuh"
#include "kernels/refresh/worker.cuh"

namespace clo::kernels {

// Fills in shared.head and shared.candidates for shared.work. Executed by one thread of each block.
__device__ __forceinline__ void describe_head(const DecodeTables& t) {
  const HeadWork& work = shared.work;
  const HeadCacheView& view = t.heads[table_index(t, work.slot, work.layer, work.kv_head)];
  const SequenceRules& rules = t.slots[work.slot].rules;
  HeadMemory& head = shared.head;
  head.slots = view.slots;
  head.resident = view.resident;
  head.slot_token = view.slot_token;
  head.held = view.resident != nullptr ? nullptr : reinterpret_cast<uint32_t*>(view.held);
  head.label = view.label;
  head.state = view.state;
  head.held_tokens = static_cast<int32_t>((view.capacity_tokens + 63) / 64 * 64);
  head.num_slots_used = __ldcg(&view.state->num_slots_used);
  head.form = view.resident != nullptr ? SetForm::kList
              : rules.fetch_whole      ? SetForm::kWhole
                                       : SetForm::kDifference;

  Candidates& c = shared.candidates;
  c.first = rules.sink;
  c.end = static_cast<int32_t>(candidates_end(rules, work.context_tokens));
  c.num_select = static_cast<int32_t>(
      min(min(set_size(rules, work.context_tokens), static_cast<int64_t>(c.end - c.first)),
          static_cast<int64_t>(view.slot_capacity)));
  // Slices reach to the old set's last token, should it lie past the new candidates: its bit goes.
  const int64_t old_end = __ldcg(reinterpret_cast<const long long*>(&view.state->candidates_end));
  const int64_t all_tokens = max(static_cast<int64_t>(c.end), old_end);
  const auto pages = static_cast<int32_t>((all_tokens + kPageTokens - 1) / kPageTokens);
  const auto blocks = static_cast<int32_t>(cluster_size());
  c.slice_tokens = (pages + blocks - 1) / blocks * kPageTokens;
  c.slice_begin = min(static_cast<int32_t>(cluster_rank()) * c.slice_tokens, pages * kPageTokens);
  c.slice_end = min(c.slice_begin + c.slice_tokens, pages * kPageTokens);
}

// Writes the slice's keys; the threshold of the num_select smallest.
// Requires: 0 < num_select < number of candidates.
__device__ __forceinline__ Threshold choose(const DecodeTables& t, KeyForm& keys) {
  const SequenceRules& rules = t.slots[shared.work.slot].rules;
  Threshold threshold;
  keys = KeyForm::kWords;
  if (rules.select == SelectRule::kExact) {
    if (t.shape.head_dim == 128) {
      exact_keys<4>(t);
    } else {
      exact_keys<2>(t);
    }
    threshold = radix_threshold();
  } else if (rules.select == SelectRule::kRandom) {
    random_keys(t);
    threshold = radix_threshold();
  } else {
    threshold = hash_threshold(t, rules.select == SelectRule::kGradedHash);
    keys = KeyForm::kDistances;
  }
  if (rules.forced_new_share >= 0 && shared.head.held != nullptr &&
      shared.head.num_slots_used > 0) {
    threshold = drawn_threshold(t);
    keys = KeyForm::kDistances;
  }
  return threshold;
}

// The state of the head after the change. Executed by one thread of the cluster.
__device__ __forceinline__ void commit_state() {
  const Candidates& c = shared.candidates;
  const uint32_t blocks = cluster_size();
  const auto num_fresh = static_cast<int32_t>(shared.fresh_begin[blocks]);
  const auto num_free = static_cast<int32_t>(shared.free_begin[blocks]);
  HeadState& state = *shared.head.state;
  state.num_slots_used = shared.head.form == SetForm::kDifference
                             ? shared.head.num_slots_used + max(num_fresh - num_free, 0)
                             : c.num_select;
  state.num_set_tokens = c.num_select;
  state.label_length = shared.work.context_tokens;
  state.candidates_end = c.end;
  state.has_label = 1;
}

__device__ __forceinline__ void count_refresh(const DecodeTables& t, unsigned long long fetch_ns) {
  const Candidates& c = shared.candidates;
  DeviceCounters& counters =
      t.counters[static_cast<int64_t>(shared.work.slot) * t.shape.num_layers + shared.work.layer];
  const auto add = [](unsigned long long& count, int64_t value) {
    atomicAdd(&count, static_cast<unsigned long long>(value));
  };
  if (t.slots[shared.work.slot].rules.select == SelectRule::kExact) {
    add(counters.oracle_rows, c.end - c.first);
  }
  if (shared.head.form == SetForm::kList) return;
  const uint32_t num_fresh = shared.fresh_begin[cluster_size()];
  add(counters.rows_requested, c.num_select);
  add(counters.rows_fetched, num_fresh);
  add(counters.rows_saved_by_delta, int64_t{c.num_select} - num_fresh);
  add(counters.fetch_ns, static_cast<int64_t>(fetch_ns));
}

// Chooses again for shared.work, which thread 0 has written in every block, and brings what is
// missing. Collective over the cluster; when it returns every thread's stores are visible to
// whoever acquires what a thread of the cluster releases next. Requires: nothing else changes or
// reads the head's slots; what earlier kernels and clusters wrote has been acquired by every
// thread.
__device__ __noinline__ void refresh_head(const DecodeTables& t) {
  if (threadIdx.x == 0) {
    describe_head(t);
    shared.num_free = 0;
  }
  __syncthreads();
  KeyForm keys = KeyForm::kNone;
  Threshold threshold;
  if (shared.candidates.num_select < shared.candidates.end - shared.candidates.first) {
    keys = KeyForm::kDistances;  // with a threshold of 0: none is taken
    if (shared.candidates.num_select > 0) threshold = choose(t, keys);
  }
  __syncthreads();  // the slice's keys are written
  mark_set(keys, threshold);
  cluster_sync();
  if (shared.head.form == SetForm::kDifference) {
    find_free_slots();
    cluster_sync();
  }
  share_counts();

  const unsigned long long started = global_timer_ns();
  if (shared.head.form == SetForm::kList) {
    write_list();
  } else {
    if (shared.work.device_rows != nullptr && t.shape.stored != RowFormat::kFull) {
      compress_fresh_rows(t);
    } else {
      fetch_rows(t);
    }
    empty_slots();
  }
  if (cluster_rank() == 0) {
    const int width = group_size(t.shape) * t.shape.head_dim;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kRefreshThreads) {
      shared.head.label[i] = __ldcg(shared.work.query + i);
    }
    if (threadIdx.x == 0) commit_state();
  }
  __threadfence();
  cluster_sync();
  if (cluster_rank() == 0 && threadIdx.x == 0 && shared.work.counted) {
    count_refresh(t, global_timer_ns() - started);
  }
}

}  // namespace clo::kernels
