#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/units.h"
#include "tensor/arena.h"

namespace clo {
namespace {

// An arena in plain words: one flag per unit of kAlignment bytes.
class NaiveArena {
 public:
  explicit NaiveArena(int64_t budget_bytes)
      : taken_(static_cast<size_t>(budget_bytes / Arena::kAlignment), false) {}

  // First unit of the first run that holds `num_bytes`, or -1.
  int64_t first_fit(int64_t num_bytes) const {
    const int64_t wanted = divide_up(num_bytes, Arena::kAlignment);
    int64_t run = 0;
    for (size_t i = 0; i < taken_.size(); ++i) {
      run = taken_[i] ? 0 : run + 1;
      if (run == wanted) return static_cast<int64_t>(i) + 1 - wanted;
    }
    return -1;
  }
  void mark(int64_t unit, int64_t num_bytes, bool taken) {
    std::fill_n(taken_.begin() + unit, divide_up(num_bytes, Arena::kAlignment), taken);
  }
  int64_t used_bytes() const {
    return std::count(taken_.begin(), taken_.end(), true) * Arena::kAlignment;
  }

 private:
  std::vector<bool> taken_;
};

struct Step {
  int what;
  int64_t bytes;
  int which;
};
std::ostream& operator<<(std::ostream& out, const Step& step) {
  return out << step.what << '/' << step.bytes << '/' << step.which;
}

struct Live {
  std::byte* at;
  int64_t bytes;
  int tag;
};

bool holds_tag(const Live& block) {
  return std::all_of(block.at, block.at + block.bytes,
                     [&](std::byte b) { return b == static_cast<std::byte>(block.tag); });
}

RC_GTEST_PROP(ArenaProperty, BehavesAsARowOfUnits, ()) {
  const auto budget = *rc::gen::inRange<int64_t>(0, 5000);
  const auto steps = *rc::gen::scale(
      3.0,
      rc::gen::container<std::vector<Step>>(rc::gen::construct<Step>(
          rc::gen::inRange(0, 5), rc::gen::inRange<int64_t>(1, 900), rc::gen::inRange(0, 1000))));
  Arena arena = Arena::create("device", budget, ErrorCode::kDeviceMemory).value();
  RC_ASSERT(arena.budget_bytes() == budget / 64 * 64);
  NaiveArena naive(arena.budget_bytes());
  std::vector<Live> live;
  std::byte* base = nullptr;  // of the first block: an empty arena hands out its beginning
  int64_t peak = 0;
  int next_tag = 1;

  for (const Step& step : steps) {
    if (step.what < 3) {
      const int64_t unit = naive.first_fit(step.bytes);
      RC_ASSERT(arena.fits(step.bytes) == (unit >= 0));
      const auto block = arena.allocate(step.bytes);
      RC_ASSERT(bool{block} == (unit >= 0));
      if (!block) {
        RC_ASSERT(block.error().code == ErrorCode::kDeviceMemory);
        RC_ASSERT(block.error().message.find("device arena") != std::string::npos);
        continue;
      }
      if (base == nullptr) base = *block;
      RC_ASSERT(*block == base + unit * Arena::kAlignment);
      RC_ASSERT(reinterpret_cast<uintptr_t>(*block) % Arena::kAlignment == 0);
      RC_ASSERT(arena.contains(*block));
      RC_ASSERT(arena.contains(*block + step.bytes - 1));
      naive.mark(unit, step.bytes, true);
      live.push_back({*block, step.bytes, next_tag++ & 0xFF});
      std::memset(*block, live.back().tag, static_cast<size_t>(step.bytes));
    } else if (!live.empty()) {
      const size_t i = static_cast<size_t>(step.which) % live.size();
      RC_ASSERT(holds_tag(live[i]));  // no other block was written over it
      arena.deallocate(live[i].at);
      naive.mark((live[i].at - base) / Arena::kAlignment, live[i].bytes, false);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
    }
    peak = std::max(peak, naive.used_bytes());
    RC_ASSERT(arena.used_bytes() == naive.used_bytes());
    RC_ASSERT(arena.peak_bytes() == peak);
    RC_ASSERT(arena.used_bytes() <= arena.budget_bytes());
  }
  for (const Live& block : live) {
    RC_ASSERT(holds_tag(block));
    arena.deallocate(block.at);
  }
  RC_ASSERT(arena.used_bytes() == 0);
  if (arena.budget_bytes() > 0) RC_ASSERT(arena.fits(arena.budget_bytes()));  // all merged again
  RC_ASSERT(!arena.fits(arena.budget_bytes() + 1));
}

TEST(ArenaProperty, AMovedArenaKeepsItsBlocks) {
  Arena first = Arena::create("host", 1024, ErrorCode::kHostMemory).value();
  std::byte* block = *first.allocate(100);
  block[99] = std::byte{9};
  Arena second = std::move(first);
  EXPECT_TRUE(second.contains(block));
  EXPECT_EQ(second.used_bytes(), 128);
  EXPECT_TRUE(block[99] == std::byte{9});
  second.deallocate(block);
  EXPECT_EQ(second.used_bytes(), 0);
}

TEST(ArenaProperty, DeallocatingWhatWasNotAllocatedIsAFaultOfTheProgram) {
  Arena arena = Arena::create("host", 1024, ErrorCode::kHostMemory).value();
  std::byte* block = *arena.allocate(64);
  EXPECT_DEATH(arena.deallocate(block + 64), "allocated_");
  arena.deallocate(block);
  EXPECT_DEATH(arena.deallocate(block), "allocated_");
}

}  // namespace
}  // namespace clo
