#pragma once
// Which rows one (row of the step, KV head) attends to, as one list: sinks, then the set, then the
// ring; or every row. Mirror of list_rows in reference/cpu_attend.cpp. Entries of the set that are
// holes, or still in the ring, stay in the list and are masked when they are read.
//
// The length of the list is a function of the context alone, never of what the slots hold now: the
// set's part is as long as a set of this context can be. So every block deals the same tiles,
// however late it starts and whatever refreshes have begun meanwhile, and waits only for heads it
// reads.
#include <cstdint>

#include "kernels/attend/deal.h"
#include "kernels/rules.cuh"

namespace clo::kernels {

struct HeadRows {
  const std::byte* fixed = nullptr;  // sink rows, or all rows of a resident head: full rows
  const std::byte* ring = nullptr;   // token t at t mod ring_tokens; null: rows are in `fixed`
  const std::byte* slots = nullptr;  // stored rows of the set's entries; null: they are in by_token
  const std::byte* by_token = nullptr;  // stored rows of a resident head
  const int32_t* map = nullptr;  // token of each entry of the set; null: the tokens in their order
  const HeadState* state = nullptr;  // null: the set is not read
  int32_t slot = -1;                 // batch slot; -1: the row serves no sequence
  int32_t context = 0;               // tokens, the step's own included
  int32_t num_sinks = 0;             // list entries [0, num_sinks) are tokens of the same number
  int32_t num_mapped = 0;            // then this many places for entries of the map
  int32_t num_used = 0;              // of them in use: known once nothing is pending
  int32_t ring_begin = 0;            // then tokens [ring_begin, context)
  int32_t ring_tokens = 0;
  int32_t count = 0;  // entries in all
};

// Longest set at this context. Sizes grow with the context, and with a dial this takes the largest
// scale so far; slots in use never pass the largest set so far, so no set chosen up to now is
// longer.
__device__ __forceinline__ int32_t longest_set(const SequenceRules& rules, int32_t slot_capacity,
                                               int32_t context) {
  const int64_t candidates = candidates_end(rules, context) - rules.sink;
  const int64_t of_policy = policy_set_size(rules, context);
  const int64_t size = rules.has_dial ? scaled_set_size(of_policy, rules.largest_scale) : of_policy;
  const int64_t most = size < candidates ? size : candidates;
  return static_cast<int32_t>(most < slot_capacity ? most : slot_capacity);
}

// `pair` numbers (row, KV head), KV head fastest. Leaves num_used at 0.
__device__ __forceinline__ HeadRows head_rows(const DecodeTables& t, int32_t layer, int32_t pair) {
  HeadRows h;
  const int32_t slot_index = t.row_slot[pair / t.shape.num_kv_heads];
  if (slot_index < 0) return h;
  const BatchSlot& slot = t.slots[slot_index];
  const HeadCacheView& view =
      t.heads[table_index(t, slot_index, layer, pair % t.shape.num_kv_heads)];
  if (slot.active == 0) return h;
  const auto context = static_cast<int32_t>(slot.num_tokens) + 1;
  const bool resident = view.resident != nullptr;
  h.slot = slot_index;
  h.context = context;
  // Where stored rows are compressed a resident head keeps a sink and a ring of full ones as well.
  const bool whole = resident && t.shape.stored == RowFormat::kFull;
  h.fixed = whole ? view.resident : view.sink;
  h.by_token = view.resident;
  const bool all = attends_all(slot.rules, resident, layer, context);
  if (all && whole) {
    h.num_sinks = h.ring_begin = h.count = context;
    return h;
  }
  h.ring = whole ? nullptr : view.ring;
  h.slots = resident ? nullptr : view.slots;
  h.ring_tokens = view.ring_tokens;
  h.num_sinks = min(view.sink_tokens, context);
  h.ring_begin = max(h.num_sinks, context - view.ring_tokens);
  if (all) {
    h.num_mapped = h.num_used = h.ring_begin - h.num_sinks;
  } else {
    h.map = view.slot_token;
    h.state = view.state;
    h.num_mapped = longest_set(slot.rules, view.slot_capacity, context);
  }
  h.count = h.num_sinks + h.num_mapped + (context - h.ring_begin);
  return h;
}

// Token of list entry `at` when that takes a look into the map; anything otherwise. Apart from
// row_of, so that the load is on its way before it is needed.
__device__ __forceinline__ int32_t mapped_token(const HeadRows& h, int32_t at) {
  const int32_t entry = at - h.num_sinks;
  if (entry < 0 || entry >= h.num_used) return -1;
  return h.map != nullptr ? h.map[entry] : at;
}

// Whether list entry `at` is a stored row, and not a full one.
__device__ __forceinline__ bool is_stored(const HeadRows& h, int32_t at) {
  return at >= h.num_sinks && at < h.num_sinks + h.num_mapped;
}

// The row of list entry `at`, null when it is masked or past the end.
__device__ __forceinline__ const std::byte* row_of(const HeadRows& h, int32_t at, int32_t mapped,
                                                   int64_t row_bytes, int64_t stored_bytes) {
  if (at >= h.count) return nullptr;
  if (at < h.num_sinks) return h.fixed + at * row_bytes;
  const int32_t entry = at - h.num_sinks;
  if (entry < h.num_mapped) {
    if (mapped < 0 || mapped >= h.ring_begin) return nullptr;
    return h.slots != nullptr ? h.slots + entry * stored_bytes : h.by_token + mapped * stored_bytes;
  }
  const int32_t token = h.ring_begin + (entry - h.num_mapped);
  return h.ring != nullptr ? h.ring + token % h.ring_tokens * row_bytes
                           : h.fixed + token * row_bytes;
}

}  // namespace clo::kernels
