#include "attention/sequence_kv.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "kv/memory_plan.h"
#include "kv_world.h"
#include "reuse/persistent_heads.h"

namespace clo {
namespace {

// What a failed create() must leave as it was: every page's references, and the free bytes. The
// stored prefixes too: a request that cannot be admitted must not push them out.
struct Snapshot {
  explicit Snapshot(const KvWorld& world)
      : device_bytes(world.device.used_bytes()),
        used_pages(world.store.used_pages()),
        unreferenced(world.store.unreferenced_pages()) {
    for (PageId page = 0; page < world.store.num_pages(); ++page) {
      states.push_back(world.store.state(page));
      references.push_back(world.store.references(page));
      codes.push_back(world.codes.is_resident(page));
    }
  }
  bool operator==(const Snapshot&) const = default;
  int64_t device_bytes, used_pages, unreferenced;
  std::vector<HostStore::PageState> states;
  std::vector<int32_t> references;
  std::vector<bool> codes;
};

std::vector<int32_t> prompt_of(int which, int64_t length) {
  // Prompts share their first 300 tokens with those of equal parity.
  std::vector<int32_t> tokens;
  for (int64_t t = 0; t < length; ++t) tokens.push_back(t < 300 ? which % 2 : which);
  return tokens;
}

struct Live {
  std::unique_ptr<SequenceKv> kv;
  std::vector<int32_t> tokens;
  bool shares = true;
};

std::vector<PageId> pages_of(const KvWorld& world, SequenceKv& kv) {
  std::vector<PageId> pages;
  const SequenceLayerView view = kv.layer_view(0);
  if (view.host_rows == nullptr) return pages;
  for (int64_t p = 0; p * kPageTokens < kv.capacity_tokens(); ++p) {
    for (PageId page = 0; page < world.store.num_pages(); ++page) {
      if (world.store.rows(0, page) == view.host_rows[p]) pages.push_back(page);
    }
  }
  return pages;
}

void check_pages(KvWorld& world, std::vector<Live>& live) {
  std::map<PageId, int> users;
  for (Live& sequence : live) {
    SequenceKv& kv = *sequence.kv;
    const std::vector<PageId> pages = pages_of(world, kv);
    RC_ASSERT(std::set<PageId>(pages.begin(), pages.end()).size() == pages.size());
    for (size_t p = 0; p < pages.size(); ++p) {
      ++users[pages[p]];
      for (int32_t layer = 0; layer < world.shape.num_layers; ++layer) {
        const SequenceLayerView view = kv.layer_view(layer);
        RC_ASSERT(view.host_rows[p] == world.store.rows(layer, pages[p]));
        if (sequence.shares && world.shape.code_bits > 0) {
          RC_ASSERT(view.host_codes[p] == world.store.codes(layer, pages[p]));
        }
      }
    }
    // Codes are where somebody will read them, and nowhere else.
    const SequenceLayerView view = kv.layer_view(0);
    RC_ASSERT((view.host_codes != nullptr) == (sequence.shares && world.shape.code_bits > 0));
    RC_ASSERT((view.device_codes != nullptr) == reads_codes(kv.policy(), world.shape));
    for (int64_t p = 0; view.device_codes != nullptr && p * kPageTokens < kv.capacity_tokens();
         ++p) {
      RC_ASSERT(world.device.contains(view.device_codes[p]));
    }
  }
  // A page has as many references as sequences use it; shared ones are published.
  for (PageId page = 0; page < world.store.num_pages(); ++page) {
    RC_ASSERT(world.store.references(page) == users[page]);
    if (users[page] > 1) {
      RC_ASSERT(world.store.state(page) == HostStore::PageState::kPublished);
    }
  }
}

// Head blocks of all sequences: inside the arena, no two overlapping.
void check_heads(KvWorld& world, std::vector<Live>& live) {
  std::vector<std::pair<const std::byte*, const std::byte*>> blocks;
  for (Live& sequence : live) {
    for (int32_t layer = 0; layer < world.shape.num_layers; ++layer) {
      for (int32_t h = 0; h < world.shape.num_kv_heads; ++h) {
        const HeadCacheView& head = sequence.kv->head(layer, h);
        const std::byte* begin = head.sink != nullptr ? head.sink : head.resident;
        const auto* end = reinterpret_cast<const std::byte*>(head.state + 1);
        RC_ASSERT(head.is_resident() == sequence.kv->is_resident(layer, h));
        RC_ASSERT(world.device.contains(begin));
        RC_ASSERT(world.device.contains(end - 1));
        blocks.emplace_back(begin, end);
      }
    }
  }
  std::sort(blocks.begin(), blocks.end());
  for (size_t i = 1; i < blocks.size(); ++i) RC_ASSERT(blocks[i - 1].second <= blocks[i].first);
}

// The plan that admission made for a sequence covers what create() reserves.
int64_t planned_bytes(const KvShape& shape, const SequenceKv::Options& options) {
  PlanInput input;
  input.shape = shape;
  input.context_tokens = options.capacity_tokens;
  input.sink_tokens = options.policy.sink;
  input.ring_tokens = ring_tokens(options.policy);
  input.slot_capacity = slot_capacity(options.policy, options.capacity_tokens);
  input.num_dense_heads = num_dense_heads(options.policy, shape);
  input.num_persistent_heads = num_fixed_persistent_heads(options.policy, shape);
  if (options.policy.persistent == PolicyOptions::Persistent::kFillBudget) {
    input.num_persistent_heads = options.num_budget_heads;
  }
  input.host_copy = options.host_copy;
  input.device_codes = reads_codes(options.policy, shape);
  return sketch_memory(input).device_bytes;
}

SequenceKv::Options arbitrary_options(const KvShape& shape, const std::vector<int32_t>& prompt) {
  SequenceKv::Options options;
  options.policy = arbitrary_policy(shape, false);
  options.capacity_tokens = std::ssize(prompt) + *rc::gen::element<int64_t>(1, 20, 300);
  options.num_budget_heads = *rc::gen::inRange(0, 5);
  options.host_copy = *rc::gen::element(true, true, false);
  options.prompt = prompt;
  return options;
}

void create_one(KvWorld& world, std::vector<Live>& live) {
  const std::vector<int32_t> prompt = prompt_of(
      *rc::gen::inRange(0, 4), *rc::gen::element<int64_t>(1, 256, 257, 300, 513, 700, 700));
  const SequenceKv::Options options = arbitrary_options(world.shape, prompt);
  const Snapshot before(world);
  auto made = SequenceKv::create(world.system, options);
  if (!made) {
    RC_ASSERT(made.error().code == ErrorCode::kDeviceMemory ||
              made.error().code == ErrorCode::kHostMemory);
    RC_ASSERT(Snapshot(world) == before);
    return;
  }
  SequenceKv& kv = **made;
  const int64_t reserved = world.device.used_bytes() - before.device_bytes;
  RC_ASSERT(reserved <= SequenceKv::device_bytes(world.system, options));
  RC_ASSERT(kv.device_kv_bytes() <= SequenceKv::device_bytes(world.system, options));
  RC_ASSERT(reserved <= planned_bytes(world.shape, options));
  if (kv.reused_tokens() == 0) {
    RC_ASSERT(reserved == SequenceKv::device_bytes(world.system, options));
  }
  RC_ASSERT(kv.num_tokens() == kv.reused_tokens());
  RC_ASSERT(kv.reused_tokens() % kPageTokens == 0);
  RC_ASSERT(kv.reused_tokens() < std::ssize(prompt));  // the last token is always computed
  RC_ASSERT((kv.layer_view(0).host_rows != nullptr) ==
            SequenceKv::needs_host_copy(world.system, options));
  live.push_back({std::move(*made), prompt, options.host_copy});
}

RC_GTEST_PROP(SequenceKv, CreateAndDestroyBalance, ()) {
  const KvShape shape = arbitrary_small_shape();
  KvWorld world(shape, *rc::gen::element<int64_t>(30000, 300000, 1000000, 3000000, 100000000),
                *rc::gen::element(1, 2, 3, 4, 6, 9, 14));
  std::vector<Live> live;
  for (int step = *rc::gen::resize(100, rc::gen::inRange(10, 60)); step > 0; --step) {
    const int what = *rc::gen::element(0, 0, 1, 1, 2, 2);
    if (what == 0) {
      create_one(world, live);
    } else if (!live.empty()) {
      const size_t which = *rc::gen::inRange<size_t>(0, live.size());
      Live& sequence = live[which];
      if (what == 1) {  // rows arrive; full pages become findable
        const int64_t count = std::min(*rc::gen::element<int64_t>(1, 100, 256, 600, 700),
                                       std::ssize(sequence.tokens) - sequence.kv->num_tokens());
        sequence.kv->advance(std::max<int64_t>(0, count));
        if (sequence.shares && *rc::gen::element(true, true, false)) {
          sequence.kv->publish(
              std::span(sequence.tokens).first(static_cast<size_t>(sequence.kv->num_tokens())));
        }
      } else {  // in whatever state it is
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
      }
    }
    check_pages(world, live);
    check_heads(world, live);
  }
  live.clear();
  RC_ASSERT(world.device.used_bytes() == 0);
  RC_ASSERT(world.pages_in_use() == 0);
  world.store.drop_unused();
  RC_ASSERT(world.store.used_pages() == 0);
}

// Every device budget from nothing to enough, so that each allocation in turn is the one refused.
TEST(SequenceKv, EveryShortageOfDeviceMemoryLeavesNothing) {
  const KvShape shape{2, 2, 1, 16, DType::kF32, 64};
  const std::vector<int32_t> prompt = prompt_of(0, 700);
  for (const bool host_copy : {true, false}) {
    SequenceKv::Options options;
    options.capacity_tokens = 800;
    options.prompt = prompt;
    options.host_copy = host_copy;
    options.policy.set_tokens = 10;
    if (!host_copy) options.policy.persistent = PolicyOptions::Persistent::kAll;
    bool fitted = false;
    for (int64_t budget = 0; !fitted; budget += 1024) {
      KvWorld world(shape, budget, 4);
      // A stored prefix that the sequence would share, and one that it would push out.
      for (const int which : {0, 1}) {
        const PageId page = *world.store.allocate();
        world.store.mark_full(page);
        const auto tokens = prompt_of(which, 256);
        world.store.publish(page, page_key(world.system.root_key, tokens), tokens);
        world.store.release(page);
      }
      const Snapshot before(world);
      auto made = SequenceKv::create(world.system, options);
      fitted = bool{made};
      if (fitted) {
        EXPECT_LE(SequenceKv::device_bytes(world.system, options), budget);
        EXPECT_EQ((*made)->reused_tokens(), host_copy ? 256 : 0);
      } else {
        EXPECT_EQ(made.error().code, ErrorCode::kDeviceMemory);
        ASSERT_TRUE(Snapshot(world) == before) << budget;
      }
    }
  }
}

TEST(SequenceKv, AShortageOfPagesLeavesStoredPrefixesAlone) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 64};
  KvWorld world(shape, 10000000, 3);
  for (const int which : {0, 1}) {
    const PageId page = *world.store.allocate();
    world.store.mark_full(page);
    world.store.publish(page, page_key(world.system.root_key, prompt_of(which, 256)),
                        prompt_of(which, 256));
    world.store.release(page);
  }
  const std::vector<int32_t> prompt = prompt_of(0, 1000);
  SequenceKv::Options options;
  options.prompt = prompt;
  options.capacity_tokens = 1024;  // four pages of three
  const Snapshot before(world);
  const auto refused = SequenceKv::create(world.system, options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kHostMemory);
  EXPECT_NE(refused.error().message.find("--host-memory"), std::string::npos);
  EXPECT_TRUE(Snapshot(world) == before);
  options.capacity_tokens = 768;
  EXPECT_TRUE(SequenceKv::create(world.system, options));
}

// A backend that runs a step ahead has written one row more than the sequence counts: a head that
// is demoted then has that one too.
TEST(SequenceKv, ADemotedHeadHasTheRowsOfAStepLaunchedAhead) {
  const KvShape shape{1, 4, 4, 16, DType::kF32, 64};
  KvWorld world(shape, 10000000, 4);
  SequenceKv::Options options;
  options.capacity_tokens = 100;
  options.policy.set_tokens = 20;
  options.policy.sink = 2;
  options.policy.recent = 4;
  options.policy.max_label_age = 2;
  options.num_budget_heads = 3;
  options.may_demote = true;
  const auto kv = SequenceKv::create(world.system, options).value();
  const SequenceLayerView view = kv->layer_view(0);
  constexpr int64_t kCounted = 30, kWritten = 31;
  const int64_t row = shape.row_bytes();
  for (int32_t h = 0; h < 4; ++h) {
    for (int64_t t = 0; t < kWritten; ++t) {
      std::memset(view.host_rows[0] + (h * kPageTokens + t) * row, static_cast<int>(t + 1),
                  static_cast<size_t>(row));
    }
  }
  kv->advance(kCounted);
  kv->demote(3, kWritten);
  ASSERT_EQ(kv->num_resident_heads(), 0);
  for (int32_t h = 0; h < 3; ++h) {
    const HeadCacheView& head = kv->head(0, h);
    for (int64_t t = kWritten - head.ring_tokens; t < kWritten; ++t) {
      EXPECT_EQ(head.ring[t % head.ring_tokens * row], static_cast<std::byte>(t + 1)) << t;
    }
    for (int64_t t = 0; t < 2; ++t) EXPECT_EQ(head.sink[t * row], static_cast<std::byte>(t + 1));
  }
}

// Heads that the prompt's end showed to be easy give their place to hard ones: rows are those of
// the store, sinks and rings stay what they were, and what no saving pays for stays where it is.
TEST(SequenceKv, HardHeadsTakeThePlacesOfEasyOnes) {
  for (const RowFormat stored : {RowFormat::kFull, RowFormat::kInt8}) {
    KvShape shape{1, 4, 4, 16, DType::kF32, 64};
    shape.stored = stored;
    for (const int64_t new_tokens : {4, 1000}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(stored) << " " << new_tokens);
      KvWorld world(shape, 10000000, 8);
      constexpr int64_t kPrompt = 301;  // no multiple of the rows that move together
      SequenceKv::Options options;
      options.capacity_tokens = kPrompt + new_tokens;
      options.policy.set_tokens = 20;
      options.policy.sink = 2;
      options.policy.recent = 4;
      options.policy.max_label_age = 2;
      options.num_budget_heads = 2;
      options.may_demote = true;
      const auto kv = SequenceKv::create(world.system, options).value();
      ASSERT_TRUE(kv->is_resident(0, 0) && kv->is_resident(0, 1));
      ASSERT_TRUE(kv->can_settle_residents());
      const auto bytes = static_cast<size_t>(shape.stored_row_bytes());
      for (int32_t h = 0; h < 4; ++h) {
        for (int64_t t = 0; t < kPrompt; ++t) {
          std::memset(kv->layer_view(0).host_rows[t / kPageTokens] +
                          (h * kPageTokens + t % kPageTokens) * bytes,
                      static_cast<int>(50 * h + t % 50 + 1), bytes);
        }
        const HeadCacheView& head = kv->head(0, h);
        if (head.ring == nullptr) continue;
        std::memset(head.sink, 200 + h, static_cast<size_t>(2 * shape.row_bytes()));
        std::memset(head.ring, 210 + h, static_cast<size_t>(head.ring_tokens * shape.row_bytes()));
      }
      kv->advance(kPrompt);
      const int64_t device_bytes = kv->device_kv_bytes();
      // Head 1 is the easiest, head 2 the hardest; 0 and 3 are alike.
      for (const auto& [h, share] : {std::pair{0, 0.5}, {1, 0.0}, {2, 1.0}, {3, 0.5}}) {
        kv->note_difficulty(0, h, share, 64);
      }
      kv->settle_residents();
      EXPECT_EQ(kv->device_kv_bytes(), device_bytes);
      EXPECT_EQ(kv->num_resident_heads(), 2);
      // Four steps cannot save the 301 rows that would move.
      EXPECT_EQ(kv->num_swapped_heads(), new_tokens == 4 ? 0 : 1);
      EXPECT_EQ(kv->is_resident(0, 2), new_tokens != 4);
      if (new_tokens == 4) {
        // What is given up is of those that are resident, and no other head notices.
        kv->head(0, 2).state->has_label = kv->head(0, 3).state->has_label = 1;
        kv->demote(1, kPrompt);
        EXPECT_TRUE(kv->is_resident(0, 0));
        EXPECT_EQ(kv->num_resident_heads(), 1);
        EXPECT_EQ(kv->num_demoted_heads(), 1);
        EXPECT_EQ(kv->device_kv_bytes(), device_bytes - kv->bytes_of_demotion());
        EXPECT_EQ(kv->head(0, 2).state->has_label, 1);
        EXPECT_EQ(kv->head(0, 3).state->has_label, 1);
        continue;
      }
      EXPECT_FALSE(kv->is_resident(0, 1));
      const HeadCacheView &hard = kv->head(0, 2), &easy = kv->head(0, 1);
      for (int64_t t = 0; t < kPrompt; ++t) {
        ASSERT_EQ(hard.resident[t * bytes], static_cast<std::byte>(100 + t % 50 + 1)) << t;
      }
      EXPECT_EQ(hard.state->has_label, 0);
      EXPECT_EQ(easy.state->has_label, 0);
      EXPECT_EQ(easy.slot_token[0], -1);
      const int64_t row = shape.row_bytes();
      for (int64_t t = kPrompt - easy.ring_tokens; t < kPrompt; ++t) {
        const auto found = easy.ring[t % easy.ring_tokens * row];
        EXPECT_EQ(found, stored == RowFormat::kFull ? static_cast<std::byte>(50 + t % 50 + 1)
                                                    : std::byte{211});
      }
      if (stored != RowFormat::kFull) {
        EXPECT_EQ(hard.sink[0], std::byte{202});
        EXPECT_EQ(hard.ring[0], std::byte{212});
        EXPECT_EQ(easy.sink[0], std::byte{201});
      }
    }
  }
}

TEST(SequenceKv, AProfileWeighsAsMuchAsThePromptsEnd) {
  const KvShape shape{1, 2, 2, 16, DType::kF32, 64};
  KvWorld world(shape, 10000000, 8);
  world.system.profile.difficulty = {1.0f, 0.0f};
  SequenceKv::Options options;
  options.capacity_tokens = 2000;
  options.policy.set_tokens = 20;
  options.num_budget_heads = 1;
  const auto kv = SequenceKv::create(world.system, options).value();
  ASSERT_TRUE(kv->is_resident(0, 0));
  kv->advance(300);
  // 0.2 and 1 of the prompt with 1 and 0 of the profile: 0.6 and 0.5.
  kv->note_difficulty(0, 0, 0.2, 64);
  kv->note_difficulty(0, 1, 1.0, 64);
  kv->settle_residents();
  EXPECT_TRUE(kv->is_resident(0, 0));
  EXPECT_EQ(kv->num_swapped_heads(), 0);
}

TEST(SequenceKv, AListedHeadThatDoesNotExistIsRefused) {
  KvWorld world({1, 1, 1, 16, DType::kF32, 64}, 10000000, 3);
  SequenceKv::Options options;
  options.capacity_tokens = 100;
  options.policy.persistent = PolicyOptions::Persistent::kList;
  options.policy.persistent_heads = {{0, 1}};
  const Snapshot before(world);
  const auto refused = SequenceKv::create(world.system, options);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadFlag);
  EXPECT_TRUE(Snapshot(world) == before);
}

// A dense sequence reads no codes: none are reserved on the device, in its own bytes and in the
// arena's. Its pages still hold them when others may share those, and not otherwise.
TEST(SequenceKv, CodesAreOnTheDeviceOnlyForHashSelection) {
  const KvShape shape{2, 4, 2, 16, DType::kF32, 128};
  const int64_t code_bytes = 3 * kPageTokens * shape.token_code_bytes();
  for (const bool host_copy : {true, false}) {
    std::map<Select, int64_t> bytes;
    for (const Select select :
         {Select::kNone, Select::kHash, Select::kGradedHash, Select::kExact, Select::kRandom}) {
      KvWorld world(shape, 100000000, 4);
      SequenceKv::Options options;
      options.capacity_tokens = 700;
      options.host_copy = host_copy;
      options.policy.select = select;
      options.policy.persistent = PolicyOptions::Persistent::kAll;
      const auto kv = SequenceKv::create(world.system, options).value();
      bytes[select] = kv->device_kv_bytes();
      EXPECT_EQ(world.device.used_bytes(), kv->device_kv_bytes());
      EXPECT_EQ(SequenceKv::device_bytes(world.system, options), kv->device_kv_bytes());
      EXPECT_EQ(kv->layer_view(0).device_codes != nullptr, selects_by_code(select));
      EXPECT_EQ(kv->layer_view(0).host_codes != nullptr, host_copy);
      EXPECT_EQ(kv->layer_view(0).host_rows != nullptr, host_copy);
    }
    EXPECT_EQ(bytes[Select::kHash] - bytes[Select::kExact], code_bytes);
    EXPECT_EQ(bytes[Select::kGradedHash], bytes[Select::kHash]);
    EXPECT_EQ(bytes[Select::kRandom], bytes[Select::kExact]);
    EXPECT_EQ(bytes[Select::kNone], bytes[Select::kExact]);
  }
}

// Codes that a dense sequence left in its pages serve a hash sequence that shares them.
TEST(SequenceKv, AHashSequenceFindsTheCodesOfADenseOnesPages) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 64};
  KvWorld world(shape, 100000000, 4);
  const std::vector<int32_t> prompt = prompt_of(0, 300);
  SequenceKv::Options options;
  options.prompt = prompt;
  options.capacity_tokens = 400;
  options.policy.select = Select::kNone;
  {
    auto dense = SequenceKv::create(world.system, options).value();
    for (int64_t t = 0; t < kPageTokens; ++t) {
      dense->layer_view(0).host_codes[0][t] = static_cast<uint64_t>(t) * 3;
    }
    dense->advance(300);
    dense->publish(prompt);
  }
  options.policy.select = Select::kHash;
  auto hash = SequenceKv::create(world.system, options).value();
  ASSERT_EQ(hash->reused_tokens(), kPageTokens);
  for (int64_t t = 0; t < kPageTokens; ++t) {
    ASSERT_EQ(hash->layer_view(0).device_codes[0][t], static_cast<uint64_t>(t) * 3);
  }
}

// A prefix is useful only from its first page on, so the last page of a finished sequence must be
// the first to go.
TEST(SequenceKv, AStoredPrefixShrinksFromItsEnd) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 64};
  KvWorld world(shape, 100000000, 4);
  const std::vector<int32_t> prompt = prompt_of(0, 1000);
  SequenceKv::Options options;
  options.prompt = prompt;
  options.capacity_tokens = 1000;
  std::vector<PageId> pages;
  {
    auto sequence = SequenceKv::create(world.system, options).value();
    sequence->advance(1000);
    sequence->publish(prompt);
    pages = pages_of(world, *sequence);
  }
  ASSERT_TRUE(world.store.allocate());  // the page that was not full
  for (const size_t stored : {3, 2, 1, 0}) {
    for (size_t p = 0; p < 3; ++p) {
      EXPECT_EQ(world.store.state(pages[p]) == HostStore::PageState::kPublished, p < stored) << p;
    }
    EXPECT_EQ(bool{world.store.allocate()}, stored > 0);
  }
}

}  // namespace
}  // namespace clo
