#include "kv/head_cache.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>

namespace clo {
namespace {

// A block of exactly the bytes a head asks for, so that sanitizers see a byte too far.
struct Block {
  explicit Block(int64_t bytes) : size(bytes) {
    memory = static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kAlign));
    std::memset(memory, 0xA5, static_cast<size_t>(bytes));  // bind must not rely on zeros
  }
  ~Block() { ::operator delete(memory, kAlign); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  static constexpr std::align_val_t kAlign{64};
  int64_t size = 0;
  std::byte* memory = nullptr;
};

struct Step {
  int what;
  uint64_t seed;
  int keep_percent;  // how much of the last set the new one keeps
  int size_percent;  // of the slots
};
std::ostream& operator<<(std::ostream& out, const Step& s) {
  return out << s.what << '/' << s.seed << '/' << s.keep_percent << '/' << s.size_percent;
}

std::vector<int32_t> next_set(const std::vector<int32_t>& last, const Step& step, int32_t capacity,
                              int64_t num_tokens) {
  std::mt19937_64 random(step.seed);
  const auto size = static_cast<size_t>(
      std::min<int64_t>(num_tokens, (int64_t{capacity} * step.size_percent + 99) / 100));
  std::set<int32_t> chosen;
  for (const int32_t token : last) {
    if (chosen.size() < size && static_cast<int>(random() % 100) < step.keep_percent) {
      chosen.insert(token);
    }
  }
  while (chosen.size() < size) chosen.insert(static_cast<int32_t>(random() % num_tokens));
  return {chosen.begin(), chosen.end()};
}

using SlotMap = std::map<int32_t, int32_t>;  // slot -> token: the naive head cache

SlotMap read_map(const HeadCacheView& head) {
  SlotMap map;
  for (int32_t slot = 0; slot < head.state->num_slots_used; ++slot) {
    if (head.slot_token[slot] >= 0) map[slot] = head.slot_token[slot];
  }
  return map;
}

std::set<int32_t> tokens_of(const SlotMap& map) {
  std::set<int32_t> tokens;
  for (const auto& [slot, token] : map) tokens.insert(token);
  return tokens;
}

// The invariants that the header states, against the naive map.
void check_invariants(const HeadCacheView& head, const SlotMap& naive) {
  RC_ASSERT(read_map(head) == naive);
  const std::set<int32_t> tokens = tokens_of(naive);
  RC_ASSERT(tokens.size() == naive.size());  // no token in two slots
  RC_ASSERT(head.state->num_set_tokens == static_cast<int32_t>(naive.size()));
  RC_ASSERT(head.state->num_slots_used <= head.slot_capacity);
  const int64_t num_bits = (head.capacity_tokens + 63) / 64 * 64;
  for (int64_t t = 0; t < num_bits; ++t) {
    RC_ASSERT(holds(head, t) == tokens.contains(static_cast<int32_t>(t)));
  }
  for (int32_t slot = head.state->num_slots_used; slot < head.slot_capacity; ++slot) {
    RC_ASSERT(head.slot_token[slot] == -1);
  }
}

void check_difference(const HeadCacheView& head, const SlotMap& naive,
                      const std::vector<int32_t>& set, const SetDifference& difference) {
  const std::set<int32_t> held = tokens_of(naive), wanted(set.begin(), set.end());
  // Fills are minimal: set \ held, ascending.
  std::vector<int32_t> missing, brought;
  std::set_difference(set.begin(), set.end(), held.begin(), held.end(),
                      std::back_inserter(missing));
  std::set<int32_t> filled;
  for (const SlotFill& fill : difference.fills) {
    brought.push_back(fill.token);
    RC_ASSERT(fill.slot >= 0);
    RC_ASSERT(fill.slot < head.slot_capacity);
    RC_ASSERT(filled.insert(fill.slot).second);
    const auto there = naive.find(fill.slot);
    RC_ASSERT(there == naive.end() || !wanted.contains(there->second));
  }
  RC_ASSERT(brought == missing);
  // What leaves is either filled or emptied, never both, and nothing else is emptied.
  std::set<int32_t> emptied(difference.emptied.begin(), difference.emptied.end());
  RC_ASSERT(emptied.size() == difference.emptied.size());
  for (const auto& [slot, token] : naive) {
    const bool leaves = !wanted.contains(token);
    RC_ASSERT(leaves == (filled.contains(slot) || emptied.contains(slot)));
    RC_ASSERT(!(filled.contains(slot) && emptied.contains(slot)));
    emptied.erase(slot);
  }
  RC_ASSERT(emptied.empty());
  // Freed slots and holes go first, in slot order; unused slots only when those are spent.
  std::vector<int32_t> expected;
  for (int32_t slot = 0; slot < head.slot_capacity; ++slot) {
    const auto there = naive.find(slot);
    if (there == naive.end() || !wanted.contains(there->second)) expected.push_back(slot);
  }
  for (size_t i = 0; i < difference.fills.size(); ++i) {
    RC_ASSERT(difference.fills[i].slot == expected[i]);
  }
}

RC_GTEST_PROP(HeadCache, BehavesAsAMapFromSlotToToken, ()) {
  const auto slots = *rc::gen::inRange<int32_t>(1, 40);
  const auto tokens = *rc::gen::inRange<int64_t>(slots, 300);
  const auto steps = *rc::gen::container<std::vector<Step>>(rc::gen::construct<Step>(
      rc::gen::inRange(0, 5), rc::gen::arbitrary<uint64_t>(), rc::gen::inRange(0, 101),
      rc::gen::element(0, 1, 30, 50, 90, 100, 100)));
  const KvShape shape{1, 2, 1, 16, DType::kBF16, 0};
  const HeadCacheSpec spec{4, 8, slots, tokens, false};
  Block block(head_cache_bytes(shape, spec));
  const HeadCacheView head = bind_head_cache(shape, spec, block.memory);

  SlotMap naive;
  std::vector<int32_t> set;
  check_invariants(head, naive);
  SetDifference difference;  // reused, as its owner does
  for (const Step& step : steps) {
    set = next_set(set, step, slots, tokens);
    if (step.what == 0) {
      find_whole(set, difference);
      RC_ASSERT(difference.fills.size() == set.size());
      RC_ASSERT(difference.emptied.empty());
      for (size_t i = 0; i < set.size(); ++i) {
        RC_ASSERT(difference.fills[i].token == set[i]);
        RC_ASSERT(difference.fills[i].slot == static_cast<int32_t>(i));
      }
      check_invariants(head, naive);
      commit_whole(head, set);
      naive.clear();
      for (size_t i = 0; i < set.size(); ++i) naive[static_cast<int32_t>(i)] = set[i];
    } else {
      find_difference(head, set, difference);
      check_invariants(head, naive);  // finding changes nothing
      check_difference(head, naive, set, difference);
      if (step.what == 1) continue;  // found, but the step was given up
      commit_difference(head, set, difference);
      for (const int32_t slot : difference.emptied) naive.erase(slot);
      for (const SlotFill& fill : difference.fills) naive[fill.slot] = fill.token;
    }
    RC_ASSERT(tokens_of(naive) == std::set<int32_t>(set.begin(), set.end()));
    check_invariants(head, naive);
  }
}

TEST(HeadCache, CommitResidentReplacesTheListAndMovesNoRows) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 0};
  const HeadCacheSpec spec{4, 8, 5, 100, true};
  Block block(head_cache_bytes(shape, spec));
  const HeadCacheView head = bind_head_cache(shape, spec, block.memory);
  ASSERT_TRUE(head.is_resident());
  std::memset(head.resident, 0x3C, static_cast<size_t>(100 * shape.row_bytes()));
  const std::vector<std::byte> before(head.resident, head.resident + 100 * shape.row_bytes());
  for (const std::vector<int32_t>& set :
       {std::vector<int32_t>{4, 9, 20, 21, 99}, {5, 6}, {}, {7, 50, 98}}) {
    commit_resident(head, set);
    EXPECT_EQ(head.state->num_slots_used, std::ssize(set));
    EXPECT_EQ(head.state->num_set_tokens, std::ssize(set));
    EXPECT_TRUE(std::equal(set.begin(), set.end(), head.slot_token));
  }
  EXPECT_TRUE(std::equal(before.begin(), before.end(), head.resident));
}

TEST(HeadCache, ASetBeyondTheSlotsIsAFaultOfTheProgram) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 0};
  const HeadCacheSpec spec{0, 1, 2, 100, false};
  Block block(head_cache_bytes(shape, spec));
  const HeadCacheView head = bind_head_cache(shape, spec, block.memory);
  const std::vector<int32_t> set = {1, 2, 3};
  SetDifference difference;
  EXPECT_DEATH(find_difference(head, set, difference), "slot_capacity");
  EXPECT_DEATH(commit_whole(head, set), "slot_capacity");
}

TEST(HeadCache, TheLabelSaysWhoChoseTheSetAndWhen) {
  const KvShape shape{1, 3, 1, 16, DType::kBF16, 0};
  const HeadCacheSpec spec{1, 2, 3, 65, false};
  Block block(head_cache_bytes(shape, spec));
  const HeadCacheView head = bind_head_cache(shape, spec, block.memory);
  EXPECT_EQ(head.state->has_label, 0);
  std::vector<float> query(3 * 16);
  for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<float>(i) - 20;
  set_label(shape, head, query.data(), 61, 59);
  EXPECT_EQ(head.state->has_label, 1);
  EXPECT_EQ(head.state->label_length, 61);
  EXPECT_EQ(head.state->candidates_end, 59);
  EXPECT_TRUE(std::equal(query.begin(), query.end(), head.label));
}

// Parts as [begin, end) with room for the counts of the spec.
std::vector<std::pair<const std::byte*, const std::byte*>> parts_of(const KvShape& shape,
                                                                    const HeadCacheSpec& spec,
                                                                    const HeadCacheView& head) {
  std::vector<std::pair<const std::byte*, const std::byte*>> parts;
  const auto add = [&](const void* at, int64_t bytes) {
    const auto* begin = static_cast<const std::byte*>(at);
    parts.emplace_back(begin, begin + bytes);
  };
  if (!spec.resident || shape.compressed()) {
    add(head.sink, spec.sink_tokens * shape.row_bytes());
    add(head.ring, spec.ring_tokens * shape.row_bytes());
  } else {
    EXPECT_EQ(head.sink, nullptr);
    EXPECT_EQ(head.ring, nullptr);
  }
  if (spec.resident) {
    add(head.resident, spec.capacity_tokens * shape.stored_row_bytes());
  } else {
    add(head.slots, spec.slot_capacity * shape.stored_row_bytes());
    add(head.held, (spec.capacity_tokens + 63) / 64 * 8);
  }
  add(head.slot_token, spec.slot_capacity * 4);
  add(head.label, int64_t{shape.group_size()} * shape.head_dim * 4);
  add(head.state, sizeof(HeadState));
  std::sort(parts.begin(), parts.end());
  return parts;
}

RC_GTEST_PROP(HeadCache, PartsLieInsideTheBlockWithoutOverlap, ()) {
  KvShape shape;
  shape.num_layers = 1;
  shape.num_kv_heads = *rc::gen::inRange(1, 4);
  shape.num_q_heads = shape.num_kv_heads * *rc::gen::inRange(1, 9);
  shape.head_dim = *rc::gen::element(16, 32, 48, 80, 128);
  shape.type = *rc::gen::element(DType::kF32, DType::kBF16);
  shape.stored = *rc::gen::element(RowFormat::kFull, RowFormat::kInt8, RowFormat::kFp8);
  HeadCacheSpec spec;
  spec.sink_tokens = *rc::gen::inRange(0, 6);
  spec.ring_tokens = *rc::gen::inRange(1, 130);
  spec.slot_capacity = *rc::gen::inRange(0, 260);
  spec.capacity_tokens = *rc::gen::inRange(1, 700);
  spec.resident = *rc::gen::arbitrary<bool>();
  Block block(head_cache_bytes(shape, spec));
  const HeadCacheView head = bind_head_cache(shape, spec, block.memory);
  const auto parts = parts_of(shape, spec, head);
  RC_ASSERT(parts.front().first >= block.memory);
  RC_ASSERT(parts.back().second <= block.memory + block.size);
  for (size_t i = 1; i < parts.size(); ++i) RC_ASSERT(parts[i - 1].second <= parts[i].first);
  for (const auto& [begin, end] : parts) {
    RC_ASSERT((begin - block.memory) % 16 == 0);  // rows and vector loads need 16
  }
  // Nothing is wasted beyond rounding each part up to a cache line.
  int64_t used = 0;
  for (const auto& [begin, end] : parts) used += (end - begin + 63) / 64 * 64;
  RC_ASSERT(used == block.size);
  RC_ASSERT(head.is_resident() == spec.resident);
  RC_ASSERT(head.state->has_label == 0);
  RC_ASSERT(head.state->num_slots_used == 0);
  RC_ASSERT(head.state->num_set_tokens == 0);
}

TEST(HeadCache, LargeBlocksAreCountedIn64Bits) {
  const KvShape shape{32, 32, 8, 128, DType::kBF16, 128};
  HeadCacheSpec spec{4, 128, 1 << 26, int64_t{1} << 30, false};
  EXPECT_GT(head_cache_bytes(shape, spec), (int64_t{1} << 26) * 512);
  spec.resident = true;
  EXPECT_GT(head_cache_bytes(shape, spec), (int64_t{1} << 30) * 512);
  EXPECT_LT(head_cache_bytes(shape, spec), (int64_t{1} << 30) * 513);
}

TEST(HeadCache, FixedRowsAreSinkRingOrResident) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 0};
  const int64_t row = shape.row_bytes();
  HeadCacheSpec spec{2, 5, 3, 64, false};
  Block block(head_cache_bytes(shape, spec));
  const HeadCacheView head = bind_head_cache(shape, spec, block.memory);
  for (int64_t context = 1; context <= 64; ++context) {
    for (int64_t t = 0; t < context; ++t) {
      const std::byte* expected = t < 2              ? head.sink + t * row
                                  : t >= context - 5 ? head.ring + t % 5 * row
                                                     : nullptr;
      ASSERT_EQ(fixed_row(shape, head, t, context), expected) << t << " of " << context;
    }
  }
  spec.resident = true;
  Block all(head_cache_bytes(shape, spec));
  const HeadCacheView resident = bind_head_cache(shape, spec, all.memory);
  for (int64_t t = 0; t < 64; ++t) {
    ASSERT_EQ(fixed_row(shape, resident, t, 64), resident.resident + t * row);
  }
}

// Beside compressed rows a resident head is as an evictable one: what it attends at full precision
// lies in sink and ring.
TEST(HeadCache, FixedRowsBesideCompressedOnesAreSinkOrRing) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 0, RowFormat::kInt8};
  const int64_t row = shape.row_bytes();
  for (const bool is_resident : {false, true}) {
    const HeadCacheSpec spec{2, 5, 3, 64, is_resident};
    Block block(head_cache_bytes(shape, spec));
    const HeadCacheView head = bind_head_cache(shape, spec, block.memory);
    ASSERT_EQ(head.is_resident(), is_resident);
    for (const int64_t context : {1, 2, 6, 7, 8, 40, 64}) {
      for (int64_t t = 0; t < context; ++t) {
        const std::byte* expected = t < 2              ? head.sink + t * row
                                    : t >= context - 5 ? head.ring + t % 5 * row
                                                       : nullptr;
        ASSERT_EQ(fixed_row(shape, head, t, context), expected) << t << " of " << context;
      }
    }
  }
}

}  // namespace
}  // namespace clo
