#include "kv/head_cache.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/units.h"

namespace clo {

namespace {

// Offsets of the parts of a block; each part starts on a cache line.
struct BlockParts {
  int64_t sink = 0, ring = 0, slots = 0, resident = 0, map = 0, held = 0, label = 0, state = 0;
  int64_t total = 0;
};

int64_t bitmap_words(const HeadCacheSpec& spec) { return divide_up(spec.capacity_tokens, 64); }

// Whether the head owns a sink and a ring.
bool has_fixed_rows(const KvShape& shape, const HeadCacheSpec& spec) {
  return !spec.resident || shape.compressed();
}

BlockParts block_parts(const KvShape& shape, const HeadCacheSpec& spec) {
  BlockParts parts;
  const auto place = [&](int64_t bytes) {
    const int64_t at = parts.total;
    parts.total = round_up(parts.total + bytes, 64);
    return at;
  };
  if (has_fixed_rows(shape, spec)) {
    parts.sink = place(spec.sink_tokens * shape.row_bytes());
    parts.ring = place(spec.ring_tokens * shape.row_bytes());
  }
  if (spec.resident) {
    parts.resident = place(spec.capacity_tokens * shape.stored_row_bytes());
  } else {
    parts.slots = place(spec.slot_capacity * shape.stored_row_bytes());
    parts.held = place(bitmap_words(spec) * 8);
  }
  parts.map = place(spec.slot_capacity * int64_t{4});
  parts.label = place(int64_t{4} * shape.group_size() * shape.head_dim);
  parts.state = place(sizeof(HeadState));
  return parts;
}

void set_bit(uint64_t* bits, int64_t i) { bits[i / 64] |= uint64_t{1} << (i % 64); }
void clear_bit(uint64_t* bits, int64_t i) { bits[i / 64] &= ~(uint64_t{1} << (i % 64)); }

}  // namespace

int64_t head_cache_bytes(const KvShape& shape, const HeadCacheSpec& spec) {
  return block_parts(shape, spec).total;
}

HeadCacheView view_head_cache(const KvShape& shape, const HeadCacheSpec& spec, std::byte* block) {
  const BlockParts parts = block_parts(shape, spec);
  HeadCacheView head;
  head.sink_tokens = spec.sink_tokens;
  head.ring_tokens = spec.ring_tokens;
  head.slot_capacity = spec.slot_capacity;
  head.capacity_tokens = spec.capacity_tokens;
  if (has_fixed_rows(shape, spec)) {
    head.sink = block + parts.sink;
    head.ring = block + parts.ring;
  }
  if (spec.resident) {
    head.resident = block + parts.resident;
  } else {
    head.slots = block + parts.slots;
    head.held = reinterpret_cast<uint64_t*>(block + parts.held);
  }
  head.slot_token = reinterpret_cast<int32_t*>(block + parts.map);
  head.label = reinterpret_cast<float*>(block + parts.label);
  head.state = reinterpret_cast<HeadState*>(block + parts.state);
  return head;
}

std::span<std::byte> head_cache_records(const KvShape& shape, const HeadCacheSpec& spec,
                                        std::byte* block) {
  const BlockParts parts = block_parts(shape, spec);
  const int64_t first = spec.resident ? parts.map : parts.held;
  return {block + first, static_cast<size_t>(parts.total - first)};
}

HeadCacheView bind_head_cache(const KvShape& shape, const HeadCacheSpec& spec, std::byte* block) {
  const HeadCacheView head = view_head_cache(shape, spec, block);
  const std::span<std::byte> records = head_cache_records(shape, spec, block);
  std::memset(records.data(), 0, records.size());
  std::fill_n(head.slot_token, spec.slot_capacity, -1);
  return head;
}

std::byte* fixed_row(const KvShape& shape, const HeadCacheView& head, int64_t token,
                     int64_t context_tokens) {
  const int64_t row = shape.row_bytes();
  if (head.is_resident() && !shape.compressed()) return head.resident + token * row;
  if (token < head.sink_tokens) return head.sink + token * row;
  if (token >= context_tokens - head.ring_tokens) {
    return head.ring + (token % head.ring_tokens) * row;
  }
  return nullptr;
}

void find_difference(const HeadCacheView& head, std::span<const int32_t> set,
                     SetDifference& difference) {
  CLO_CHECK(std::ssize(set) <= head.slot_capacity, set.size(), head.slot_capacity);
  auto& [fills, emptied, wanted] = difference;
  fills.clear();
  emptied.clear();
  wanted.assign(static_cast<size_t>(divide_up(head.capacity_tokens, 64)), 0);
  for (const int32_t token : set) {
    set_bit(wanted.data(), token);
    if (!holds(head, token)) fills.push_back({token, 0});
  }
  size_t next = 0;
  const int32_t used = head.state->num_slots_used;
  for (int32_t slot = 0; slot < used; ++slot) {
    const int32_t token = head.slot_token[slot];
    if (token >= 0 && ((wanted[static_cast<size_t>(token) / 64] >> (token % 64)) & 1u)) continue;
    if (next < fills.size()) {
      fills[next++].slot = slot;
    } else if (token >= 0) {
      emptied.push_back(slot);
    }
  }
  for (int32_t slot = used; next < fills.size(); ++slot) fills[next++].slot = slot;
}

void commit_difference(const HeadCacheView& head, std::span<const int32_t> set,
                       const SetDifference& difference) {
  HeadState& state = *head.state;
  const auto drop = [&](int32_t slot) {
    if (slot < state.num_slots_used && head.slot_token[slot] >= 0) {
      clear_bit(head.held, head.slot_token[slot]);
    }
  };
  for (const int32_t slot : difference.emptied) {
    drop(slot);
    head.slot_token[slot] = -1;
  }
  for (const SlotFill& fill : difference.fills) drop(fill.slot);
  for (const SlotFill& fill : difference.fills) {
    head.slot_token[fill.slot] = fill.token;
    set_bit(head.held, fill.token);
    state.num_slots_used = std::max(state.num_slots_used, fill.slot + 1);
  }
  state.num_set_tokens = static_cast<int32_t>(set.size());
}

void find_whole(std::span<const int32_t> set, SetDifference& difference) {
  difference.fills.clear();
  difference.emptied.clear();
  for (int32_t slot = 0; slot < std::ssize(set); ++slot) {
    difference.fills.push_back({set[static_cast<size_t>(slot)], slot});
  }
}

void commit_whole(const HeadCacheView& head, std::span<const int32_t> set) {
  CLO_CHECK(std::ssize(set) <= head.slot_capacity, set.size(), head.slot_capacity);
  HeadState& state = *head.state;
  for (int32_t slot = 0; slot < state.num_slots_used; ++slot) {
    if (head.slot_token[slot] >= 0) clear_bit(head.held, head.slot_token[slot]);
    head.slot_token[slot] = -1;
  }
  for (int32_t slot = 0; slot < std::ssize(set); ++slot) {
    head.slot_token[slot] = set[static_cast<size_t>(slot)];
    set_bit(head.held, set[static_cast<size_t>(slot)]);
  }
  state.num_slots_used = state.num_set_tokens = static_cast<int32_t>(set.size());
}

void commit_resident(const HeadCacheView& head, std::span<const int32_t> set) {
  CLO_CHECK(std::ssize(set) <= head.slot_capacity, set.size(), head.slot_capacity);
  std::copy(set.begin(), set.end(), head.slot_token);
  head.state->num_slots_used = head.state->num_set_tokens = static_cast<int32_t>(set.size());
}

void set_label(const KvShape& shape, const HeadCacheView& head, const float* query,
               int64_t context_tokens, int64_t candidates_end) {
  std::memcpy(head.label, query,
              sizeof(float) * static_cast<size_t>(shape.group_size()) *
                  static_cast<size_t>(shape.head_dim));
  head.state->label_length = context_tokens;
  head.state->candidates_end = candidates_end;
  head.state->has_label = 1;
}

}  // namespace clo
