#pragma once
// Head cache: what one (sequence, layer, KV head) holds on the device, and every legal change of
// it. This room owns layout and transitions; backends call them (or mirror them in kernels and
// are tested to be equal). No allocation: the caller gives a block of the device arena.
//
// An evictable head's block: [sink rows | ring rows | slots | held bits | slot map | label |
// state]. A resident head's block:   [all rows | set list | label | state]; its set is a sorted
// list of tokens and moves no rows. Where stored rows are compressed, [sink rows | ring rows] in
// full precision lie before all rows.
//
// States of a slot, and who moves it:
//
//   unused (at or past num_slots_used) -> held (token t)   commit_difference, commit_whole
//   held (t)  -> held (u)   commit_difference: t left the set and u, new in it, takes its slot
//   held (t)  -> hole (-1)  commit_difference: t left and no new row needed the slot
//   hole      -> held (u)   commit_difference
//   any       -> held / unused by commit_whole: slot i holds set[i]
//
// Invariants: `held` has exactly the bits of the tokens in the map; no token is in two slots;
// num_set_tokens counts the held slots. A commit happens only after attention has read the old
// rows of this step and before it reads the new ones.
#include <cstdint>
#include <span>
#include <vector>

#include "ops/kv_layout.h"

namespace clo {

struct HeadCacheSpec {
  int32_t sink_tokens = 0;
  int32_t ring_tokens = 0;      // recent + maximum label age
  int32_t slot_capacity = 0;    // largest set
  int64_t capacity_tokens = 0;  // longest context
  bool resident = false;
};

// Bytes of one head's block.
int64_t head_cache_bytes(const KvShape& shape, const HeadCacheSpec& spec);
// Where the parts lie in `block` [head_cache_bytes]; touches no memory, so `block` may be a
// device's.
HeadCacheView view_head_cache(const KvShape& shape, const HeadCacheSpec& spec, std::byte* block);
// The part of a block that says what the rows are: map, bits, label, state. Empty: all zero, and
// then -1 all over the map.
std::span<std::byte> head_cache_records(const KvShape& shape, const HeadCacheSpec& spec,
                                        std::byte* block);
// Lays an empty head cache over `block` in this process's memory.
HeadCacheView bind_head_cache(const KvShape& shape, const HeadCacheSpec& spec, std::byte* block);

// The full row of `token` on the device, or null when there is none: it is in neither sink nor
// ring, nor among resident rows that are not compressed. A set row is found through its slot
// instead, or among a resident head's rows.
std::byte* fixed_row(const KvShape& shape, const HeadCacheView& head, int64_t token,
                     int64_t context_tokens);

// One row to bring: into which slot.
struct SlotFill {
  int32_t token = 0;
  int32_t slot = 0;
};

// What turns the slots' present rows into `set`: the rows to bring, the slots that fall empty.
struct SetDifference {
  std::vector<SlotFill> fills;   // set \ held, ascending, each with the slot it will take
  std::vector<int32_t> emptied;  // slots whose token leaves and that nothing fills
  std::vector<uint64_t> wanted;  // scratch: the set as bits
};

// Slots of tokens that leave and holes are filled first, in slot order, then unused ones. Changes
// nothing. Requires: set ascending, at most slot_capacity tokens, evictable head.
void find_difference(const HeadCacheView& head, std::span<const int32_t> set,
                     SetDifference& difference);
// Makes the map, the bits and the counts say what the slots hold once the rows have arrived.
void commit_difference(const HeadCacheView& head, std::span<const int32_t> set,
                       const SetDifference& difference);

// The same for a whole-block fetch: slot i takes set[i], whatever it holds.
void find_whole(std::span<const int32_t> set, SetDifference& difference);
void commit_whole(const HeadCacheView& head, std::span<const int32_t> set);

// Replaces a resident head's set list.
void commit_resident(const HeadCacheView& head, std::span<const int32_t> set);

// Remembers which query chose the set, when, and over which candidates.
void set_label(const KvShape& shape, const HeadCacheView& head, const float* query,
               int64_t context_tokens, int64_t candidates_end);

inline bool holds(const HeadCacheView& head, int64_t token) {
  return (head.held[token / 64] >> (token % 64)) & 1u;
}

}  // namespace clo
