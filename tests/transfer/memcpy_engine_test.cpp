#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "ops/stored_row.h"
#include "transfer/transfer_engine.h"

namespace clo {
namespace {

constexpr std::byte kUntouched{0xEE};

// Moves `count` random rows of `row_bytes` to distinct slots; every slot must then hold its row and
// every other byte what it held before.
bool moves_exactly(int num_threads, int64_t count, int64_t row_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t num_slots = count + 5, num_sources = count / 2 + 3;
  std::vector<std::byte> source(static_cast<size_t>(num_sources * row_bytes));
  for (std::byte& b : source) b = static_cast<std::byte>(random() & 0x7F);
  const std::vector<std::byte> source_before = source;
  std::vector<std::byte> target(static_cast<size_t>(num_slots * row_bytes), kUntouched);

  std::vector<int64_t> slots(static_cast<size_t>(num_slots));
  for (int64_t i = 0; i < num_slots; ++i) slots[static_cast<size_t>(i)] = i;
  std::shuffle(slots.begin(), slots.end(), random);
  std::vector<RowMove> moves;
  std::vector<std::byte> expected = target;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = static_cast<int64_t>(random() % static_cast<uint64_t>(num_sources));
    const int64_t to = slots[static_cast<size_t>(i)];
    moves.push_back({source.data() + from * row_bytes, target.data() + to * row_bytes});
    std::memcpy(expected.data() + to * row_bytes, source.data() + from * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  ThreadPool pool(num_threads);
  const auto engine = make_memcpy_engine(pool);
  engine->fetch(moves, row_bytes);
  return target == expected && source == source_before;
}

RC_GTEST_PROP(MemcpyEngine, MovesTheListedRowsAndNothingElse, ()) {
  const auto threads = *rc::gen::inRange(1, 3);
  const auto count = *rc::gen::inRange<int64_t>(0, 300);
  const auto row_bytes = *rc::gen::element<int64_t>(16, 64, 80, 256, 512, 1024);
  RC_ASSERT(moves_exactly(threads, count, row_bytes, *rc::gen::arbitrary<uint64_t>()));
}

TEST(MemcpyEngine, AroundTheCountThatWakesThreads) {
  for (const int threads : {1, 2}) {
    for (const int64_t count : {0, 1, 7, 8, 9, 255, 256, 257, 3000}) {
      EXPECT_TRUE(moves_exactly(threads, count, 128, static_cast<uint64_t>(count))) << count;
    }
  }
}

TEST(MemcpyEngine, ExpandsCompressedRowsAndTouchesNothingElse) {
  for (const int threads : {1, 2}) {
    const KvShape shape{1, 1, 1, 48, DType::kBF16, 0, RowFormat::kInt8};
    const auto stored = static_cast<size_t>(shape.stored_row_bytes());
    const auto full = static_cast<size_t>(shape.row_bytes());
    constexpr size_t kRows = 100;
    std::mt19937_64 random(static_cast<uint64_t>(threads));
    std::vector<std::byte> source(kRows * stored), target(2 * kRows * full, std::byte{0xEE});
    std::vector<std::byte> expected = target;
    std::vector<RowMove> moves;
    for (size_t i = 0; i < kRows; ++i) {
      std::vector<float> key(48), value(48);
      for (float& x : key) x = static_cast<float>(random() % 1000) * 0.01f - 5;
      for (float& x : value) x = static_cast<float>(random() % 1000) * 0.1f - 50;
      compress_row(shape, key.data(), value.data(), source.data() + i * stored);
      const size_t to = (2 * i + 7) % (2 * kRows);
      moves.push_back({source.data() + i * stored, target.data() + to * full});
      expand_to_full(shape, source.data() + i * stored, expected.data() + to * full);
    }
    ThreadPool pool(threads);
    make_memcpy_engine(pool)->expand(moves, shape);
    EXPECT_TRUE(target == expected);
  }
}

TEST(MemcpyEngine, AnEmptyListIsNoWork) {
  ThreadPool pool(2);
  const auto engine = make_memcpy_engine(pool);
  engine->fetch({}, 512);
  EXPECT_EQ(engine->name(), "memcpy");
}

}  // namespace
}  // namespace clo
