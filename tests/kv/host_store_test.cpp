#include "kv/host_store.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "base/units.h"

namespace clo {
namespace {

using State = HostStore::PageState;

KvShape small_shape() { return {1, 1, 1, 16, DType::kF32, 64}; }

HostStore make_store(const KvShape& shape, int64_t num_pages) {
  auto store = HostStore::create(shape, HostLayout{shape, 1}.page_bytes() * num_pages);
  EXPECT_TRUE(store) << store.error().to_string();
  return std::move(*store);
}

std::vector<int32_t> page_tokens(int variant) {
  return std::vector<int32_t>(static_cast<size_t>(kPageTokens), variant);
}

// The store in plain words: a list of pages, an order of last use, one owner per key.
struct NaivePage {
  State state = State::kFree;
  int references = 0;
  int key = -1;
  int variant = -1;
};

struct NaiveStore {
  std::vector<NaivePage> pages;
  std::vector<PageId> unused;  // oldest first

  int count(State state) const {
    return static_cast<int>(std::count_if(
        pages.begin(), pages.end(), [&](const NaivePage& page) { return page.state == state; }));
  }
  PageId owner_of(int key) const {
    for (size_t p = 0; p < pages.size(); ++p) {
      if (pages[p].key == key) return static_cast<PageId>(p);
    }
    return -1;
  }
  // The n-th page (wrapping) that satisfies a condition, or -1.
  template <typename Condition>
  PageId pick(int n, const Condition& condition) const {
    std::vector<PageId> fitting;
    for (size_t p = 0; p < pages.size(); ++p) {
      if (condition(pages[p])) fitting.push_back(static_cast<PageId>(p));
    }
    return fitting.empty() ? -1 : fitting[static_cast<size_t>(n) % fitting.size()];
  }
  void retain(PageId page) {
    std::erase(unused, page);
    ++pages[page].references;
  }
  void release(PageId page) {
    if (--pages[page].references > 0) return;
    if (pages[page].state == State::kPublished) {
      unused.push_back(page);
    } else {
      pages[page] = {};
    }
  }
};

struct Step {
  int what, first, second;
};
std::ostream& operator<<(std::ostream& out, const Step& step) {
  return out << step.what << '/' << step.first << '/' << step.second;
}

void check_equal(const HostStore& store, const NaiveStore& naive) {
  for (size_t p = 0; p < naive.pages.size(); ++p) {
    const auto page = static_cast<PageId>(p);
    RC_ASSERT(store.state(page) == naive.pages[p].state);
    RC_ASSERT(store.references(page) == naive.pages[p].references);
  }
  RC_ASSERT(store.unreferenced_pages() == static_cast<int64_t>(naive.unused.size()));
  RC_ASSERT(store.used_pages() == store.num_pages() - naive.count(State::kFree));
  RC_ASSERT(store.available_pages() ==
            naive.count(State::kFree) + static_cast<int64_t>(naive.unused.size()));
}

void apply(HostStore& store, NaiveStore& naive, const std::array<PageKey, 3>& keys,
           const Step& step) {
  switch (step.what) {
    case 0:
    case 1: {  // allocate, more often than the rest so that the store fills
      const auto page = store.allocate();
      if (naive.count(State::kFree) == 0 && naive.unused.empty()) {
        RC_ASSERT(!page);
        RC_ASSERT(page.error().code == ErrorCode::kHostMemory);
        break;
      }
      RC_ASSERT(bool{page});
      if (naive.count(State::kFree) == 0) {
        RC_ASSERT(*page == naive.unused.front());
        naive.unused.erase(naive.unused.begin());
      } else {
        RC_ASSERT(naive.pages[*page].state == State::kFree);
      }
      RC_ASSERT(naive.pages[*page].references == 0);
      naive.pages[*page] = {State::kFilling, 1, -1, -1};
      break;
    }
    case 2: {
      const PageId page =
          naive.pick(step.first, [](const NaivePage& p) { return p.state == State::kFilling; });
      if (page < 0) break;
      store.mark_full(page);
      naive.pages[page].state = State::kFull;
      break;
    }
    case 3:
    case 4: {
      const PageId page =
          naive.pick(step.first, [](const NaivePage& p) { return p.state == State::kFull; });
      if (page < 0) break;
      const int key = step.second % 3, variant = step.second / 3 % 2;
      store.publish(page, keys[key], page_tokens(variant));
      if (naive.owner_of(key) < 0) {
        naive.pages[page].state = State::kPublished;
        naive.pages[page].key = key;
        naive.pages[page].variant = variant;
      }
      break;
    }
    case 5: {  // a key that exists with other tokens is a collision, and finds nothing
      const int key = step.first % 3, variant = step.second % 2;
      const auto found = store.find(keys[key], page_tokens(variant));
      const PageId owner = naive.owner_of(key);
      if (owner < 0 || naive.pages[owner].variant != variant) {
        RC_ASSERT(!found.has_value());
      } else {
        RC_ASSERT(found.has_value());
        RC_ASSERT(*found == owner);
        naive.retain(owner);
      }
      break;
    }
    case 6: {
      const PageId page =
          naive.pick(step.first, [](const NaivePage& p) { return p.state == State::kPublished; });
      if (page < 0) break;
      store.retain(page);
      naive.retain(page);
      break;
    }
    case 7:
    case 8: {
      const PageId page =
          naive.pick(step.first, [](const NaivePage& p) { return p.references > 0; });
      if (page < 0) break;
      store.release(page);
      naive.release(page);
      break;
    }
    case 9: {
      if (step.first % 4 != 0) break;
      store.drop_unused();
      for (const PageId page : naive.unused) naive.pages[page] = {};
      naive.unused.clear();
      break;
    }
    default:
      break;
  }
}

RC_GTEST_PROP(HostStore, BehavesAsAListOfPages, ()) {
  const auto num_pages = *rc::gen::inRange(1, 7);
  const auto steps = *rc::gen::scale(
      3.0, rc::gen::container<std::vector<Step>>(rc::gen::construct<Step>(
               rc::gen::inRange(0, 10), rc::gen::inRange(0, 64), rc::gen::inRange(0, 64))));
  HostStore store = make_store(small_shape(), num_pages);
  NaiveStore naive;
  naive.pages.resize(static_cast<size_t>(num_pages));
  // Two of the keys fall into one bucket of any hash of the low word.
  const std::array<PageKey, 3> keys = {PageKey{7, 1}, PageKey{7, 2}, PageKey{8, 1}};
  for (const Step& step : steps) {
    apply(store, naive, keys, step);
    check_equal(store, naive);
  }
}

TEST(HostStore, EvictsTheLeastRecentlyReleasedPageAndForgetsItsKey) {
  HostStore store = make_store(small_shape(), 3);
  std::array<PageId, 3> pages;
  for (int i = 0; i < 3; ++i) {
    pages[i] = *store.allocate();
    store.mark_full(pages[i]);
    store.publish(pages[i], {static_cast<uint64_t>(i), 0}, page_tokens(i));
  }
  for (const int i : {1, 0, 2}) store.release(pages[i]);
  // Page 1 is used once more, so 0 is now the oldest.
  EXPECT_EQ(store.find({1, 0}, page_tokens(1)), pages[1]);
  store.release(pages[1]);
  EXPECT_EQ(*store.allocate(), pages[0]);
  EXPECT_EQ(store.find({0, 0}, page_tokens(0)), std::nullopt);
  EXPECT_EQ(*store.allocate(), pages[2]);
  EXPECT_EQ(*store.allocate(), pages[1]);
  const auto refused = store.allocate();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kHostMemory);
  EXPECT_NE(refused.error().message.find("all 3 pages"), std::string::npos);
}

TEST(HostStore, ACollisionOfKeysShowsNoOtherTokens) {
  HostStore store = make_store(small_shape(), 1);
  const PageId page = *store.allocate();
  store.mark_full(page);
  std::vector<int32_t> tokens = page_tokens(5);
  store.publish(page, {1, 2}, tokens);
  for (const size_t at : {size_t{0}, size_t{100}, size_t{255}}) {
    std::vector<int32_t> other = tokens;
    ++other[at];
    EXPECT_EQ(store.find({1, 2}, other), std::nullopt) << at;
  }
  EXPECT_EQ(store.find({1, 2}, std::span(tokens).first(255)), std::nullopt);
  EXPECT_EQ(store.find({1, 2}, {}), std::nullopt);
  EXPECT_EQ(store.find({1, 2}, tokens), page);
}

TEST(HostStore, ASecondPageOfAKeyStaysPrivate) {
  HostStore store = make_store(small_shape(), 2);
  const PageId first = *store.allocate(), second = *store.allocate();
  store.mark_full(first);
  store.mark_full(second);
  store.publish(first, {1, 2}, page_tokens(5));
  store.publish(second, {1, 2}, page_tokens(5));
  EXPECT_EQ(store.state(second), State::kFull);
  store.release(second);
  EXPECT_EQ(store.state(second), State::kFree);
  EXPECT_EQ(store.find({1, 2}, page_tokens(5)), first);
}

TEST(HostStore, ABudgetBelowOnePageNamesTheSmallestThatWorks) {
  const int64_t page = HostLayout{small_shape(), 1}.page_bytes();
  for (const int64_t budget : {int64_t{0}, int64_t{1}, page - 1}) {
    const auto refused = HostStore::create(small_shape(), budget);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kHostMemory);
    EXPECT_NE(refused.error().message.find(format_bytes(page)), std::string::npos);
    EXPECT_NE(refused.error().message.find("--host-memory"), std::string::npos);
  }
  EXPECT_TRUE(HostStore::create(small_shape(), page));
}

TEST(HostStore, WithoutCodesThereAreNone) {
  KvShape shape = small_shape();
  shape.code_bits = 0;
  HostStore store = make_store(shape, 2);
  EXPECT_EQ(store.codes(0, 1), nullptr);
  EXPECT_NE(store.rows(0, 1), nullptr);
}

TEST(HostStore, EveryRowAndCodeHasItsOwnPlaceInsideTheArena) {
  for (const auto& [type, stored] :
       {std::pair{DType::kF32, RowFormat::kFull}, std::pair{DType::kBF16, RowFormat::kFull},
        std::pair{DType::kBF16, RowFormat::kInt8}, std::pair{DType::kF32, RowFormat::kFp8}}) {
    for (const int32_t kv_heads : {1, 3}) {
      const KvShape shape{2, kv_heads, kv_heads, 16, type, 128, stored};
      HostStore store = make_store(shape, 3);
      std::vector<std::pair<const std::byte*, int64_t>> places;
      for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
        for (PageId page = 0; page < 3; ++page) {
          for (int32_t head = 0; head < kv_heads; ++head) {
            for (int32_t token = 0; token < kPageTokens; ++token) {
              // As the layout's owners reach them: from the page's layer pointer.
              const int64_t row = int64_t{head} * kPageTokens + token;
              const std::byte* at = store.rows(layer, page) + row * shape.stored_row_bytes();
              ASSERT_EQ(at - store.rows(0, 0), store.layout().row_offset(layer, page, head, token));
              places.emplace_back(at, shape.stored_row_bytes());
              const auto* code = reinterpret_cast<const std::byte*>(store.codes(layer, page) +
                                                                    row * shape.code_words());
              ASSERT_EQ(code - reinterpret_cast<const std::byte*>(store.codes(0, 0)),
                        store.layout().code_offset(layer, page, head, token));
              places.emplace_back(code, shape.code_bytes());
            }
          }
        }
      }
      std::sort(places.begin(), places.end());
      for (size_t i = 0; i < places.size(); ++i) {
        ASSERT_TRUE(store.arena().contains(places[i].first));
        ASSERT_TRUE(store.arena().contains(places[i].first + places[i].second - 1));
        if (i > 0) {
          ASSERT_LE(places[i - 1].first + places[i - 1].second, places[i].first);
        }
      }
      EXPECT_EQ(store.layout().page_bytes() * 3,
                store.layout().rows_bytes() + store.layout().codes_bytes());
    }
  }
}

// Offsets against 128-bit arithmetic, at the first and last row before and after 2^31 and 2^32
// bytes and elements. Nothing is allocated.
TEST(HostLayout, OffsetsAreRightBeyond32Bits) {
  using Wide = __int128;
  const KvShape shape{48, 40, 8, 128, DType::kBF16, 128};
  const HostLayout layout{shape, 5000};  // about 240 GiB
  const int64_t head_page = kPageTokens * shape.row_bytes();
  std::set<int64_t> pages_of_interest;  // in units of (layer, page, head)
  for (const int64_t border : {int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 33}) {
    pages_of_interest.insert({border / head_page - 1, border / head_page, border / head_page + 1});
  }
  pages_of_interest.insert({0, int64_t{48} * 5000 * 8 - 1});
  for (const int64_t unit : pages_of_interest) {
    const auto head = static_cast<int32_t>(unit % 8);
    const int64_t page = unit / 8 % 5000;
    const auto layer = static_cast<int32_t>(unit / 8 / 5000);
    for (const int32_t token : {0, 1, 255}) {
      const Wide row = (((Wide{layer} * 5000 + page) * 8 + head) * 256 + token);
      EXPECT_EQ(layout.row_offset(layer, page, head, token), static_cast<int64_t>(row * 512));
      EXPECT_EQ(layout.code_offset(layer, page, head, token), static_cast<int64_t>(row * 16));
      EXPECT_LE(layout.row_offset(layer, page, head, token) + 512, layout.rows_bytes());
    }
  }
  EXPECT_EQ(layout.rows_bytes(), int64_t{48} * 5000 * 8 * 256 * 512);
  EXPECT_GT(layout.rows_bytes(), int64_t{1} << 37);
}

TEST(PageKey, DependsOnEverythingBefore) {
  const PageKey root{1, 2}, other_root{1, 3};
  const auto a = page_tokens(1), b = page_tokens(2);
  EXPECT_EQ(page_key(root, a), page_key(root, a));
  EXPECT_FALSE(page_key(root, a) == page_key(other_root, a));
  EXPECT_FALSE(page_key(root, a) == page_key(root, b));
  // The same last page after different ones, and the same pages in another order.
  EXPECT_FALSE(page_key(page_key(root, a), b) == page_key(page_key(root, b), b));
  EXPECT_FALSE(page_key(page_key(root, a), b) == page_key(page_key(root, b), a));
  EXPECT_FALSE(page_key(root, a) == root);
  // One token anywhere changes the key.
  std::set<std::pair<uint64_t, uint64_t>> keys;
  for (size_t i = 0; i < a.size(); ++i) {
    auto changed = a;
    changed[i] = -7;
    const PageKey key = page_key(root, changed);
    keys.emplace(key.low, key.high);
  }
  EXPECT_EQ(keys.size(), a.size());
}

}  // namespace
}  // namespace clo
