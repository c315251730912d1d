#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

namespace clo {
namespace {

using std::chrono::microseconds;

// Every chunk exactly once, whatever the number of threads and chunks.
TEST(ThreadPool, RunsEveryChunkOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.num_threads(), threads);
    for (const int64_t chunks : {0, 1, 2, 3, 7, 8, 9, 1000}) {
      std::vector<int> counts(static_cast<size_t>(chunks) + 1, 0);
      pool.run(chunks, [&](int64_t chunk, int thread) {
        ASSERT_GE(thread, 0);
        ASSERT_LT(thread, threads);
        ++counts[static_cast<size_t>(chunk)];
      });
      for (int64_t c = 0; c < chunks; ++c) EXPECT_EQ(counts[static_cast<size_t>(c)], 1) << c;
      EXPECT_EQ(counts.back(), 0);
    }
  }
}

TEST(ThreadPool, NoChunksCallNothing) {
  ThreadPool pool(2);
  pool.run(0, [](int64_t, int) { FAIL(); });
  pool.run(-3, [](int64_t, int) { FAIL(); });
  pool.run_ranges(0, 8, [](int64_t, int64_t) { FAIL(); });
}

TEST(ThreadPool, OneThreadRunsInOrderOnTheCaller) {
  ThreadPool pool(1);
  std::vector<int64_t> order;
  const auto self = std::this_thread::get_id();
  pool.run(5, [&](int64_t chunk, int thread) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    EXPECT_EQ(thread, 0);
    order.push_back(chunk);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

// A worker must take part: a chunk that waits for another one would never end otherwise.
TEST(ThreadPool, ChunksRunSideBySide) {
  for (const microseconds spin : {microseconds(0), ThreadPool::kSpin}) {
    ThreadPool pool(3, spin);
    for (int round = 0; round < 20; ++round) {
      // Long enough for workers to fall asleep between rounds.
      if (round % 5 == 0) std::this_thread::sleep_for(microseconds(300));
      std::atomic<int> arrived{0};
      std::vector<int> threads(3, -1);
      pool.run(3, [&](int64_t chunk, int thread) {
        threads[static_cast<size_t>(chunk)] = thread;
        ++arrived;
        while (arrived.load() < 3) std::this_thread::yield();
      });
      EXPECT_EQ(std::set<int>(threads.begin(), threads.end()), (std::set<int>{0, 1, 2}));
    }
  }
}

// What one loop wrote without atomics is read by the next, on whatever thread: a chunk of an old
// loop that ran late, or a write that was not yet visible, would give a wrong sum.
TEST(ThreadPool, ManyShortLoops) {
  for (const microseconds spin : {microseconds(0), microseconds(5), ThreadPool::kSpin}) {
    ThreadPool pool(4, spin);
    std::vector<int64_t> a(16), b(16);
    int64_t expected = 0;
    for (int64_t i = 0; i < 3000; ++i) {
      const int64_t chunks = 1 + i % 16;
      pool.run(16, [&](int64_t chunk, int) { a[static_cast<size_t>(chunk)] = i + chunk; });
      pool.run(chunks, [&](int64_t chunk, int) {
        b[static_cast<size_t>(chunk)] += a[static_cast<size_t>(15 - chunk)];
      });
      for (int64_t c = 0; c < chunks; ++c) expected += i + 15 - c;
    }
    EXPECT_EQ(std::accumulate(b.begin(), b.end(), int64_t{0}), expected);
  }
}

TEST(ThreadPool, RangesCoverTheCountInMultiplesOfTheGrain) {
  ThreadPool pool(3);
  for (const int64_t count : {1, 7, 8, 9, 64, 100, 12345}) {
    for (const int64_t grain : {1, 8, 100}) {
      std::vector<int> counts(static_cast<size_t>(count), 0);
      std::atomic<int64_t> ranges{0};
      pool.run_ranges(count, grain, [&](int64_t first, int64_t last) {
        ++ranges;
        EXPECT_EQ(first % grain, 0);
        EXPECT_LT(first, last);
        for (int64_t i = first; i < last; ++i) ++counts[static_cast<size_t>(i)];
      });
      EXPECT_EQ(std::count(counts.begin(), counts.end(), 1), count) << count << " " << grain;
      EXPECT_LE(ranges.load(), 3 * ThreadPool::kRangesPerThread);
      if (count <= grain) {
        EXPECT_EQ(ranges.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, PoolsDoNotMeet) {
  std::vector<int64_t> sums(3, 0);
  std::vector<std::thread> callers;
  for (size_t c = 0; c < sums.size(); ++c) {
    callers.emplace_back([&sums, c] {
      ThreadPool pool(2);
      std::vector<int64_t> parts(8, 0);
      for (int round = 0; round < 500; ++round) {
        pool.run(8, [&](int64_t chunk, int) { parts[static_cast<size_t>(chunk)] += chunk; });
      }
      sums[c] = std::accumulate(parts.begin(), parts.end(), int64_t{0});
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int64_t sum : sums) EXPECT_EQ(sum, 500 * 28);
}

// A pool may be used from one thread after another.
TEST(ThreadPool, CallersMayChange) {
  ThreadPool pool(2);
  std::vector<int64_t> parts(4, 0);
  for (int round = 0; round < 10; ++round) {
    std::thread([&] {
      pool.run(4, [&](int64_t chunk, int) { parts[static_cast<size_t>(chunk)] += 1; });
    }).join();
  }
  EXPECT_EQ(parts, (std::vector<int64_t>{10, 10, 10, 10}));
}

TEST(ThreadPool, EndsWhetherItsThreadsSpinOrSleepOrNeverWorked) {
  for (int round = 0; round < 20; ++round) {
    ThreadPool unused(4);
    ThreadPool spinning(4, microseconds(1000000));
    spinning.run(8, [](int64_t, int) {});
    ThreadPool asleep(4, microseconds(0));
    asleep.run(8, [](int64_t, int) {});
    if (round % 10 == 0) std::this_thread::sleep_for(microseconds(500));
  }
}

TEST(ThreadPool, CountsTheProcessorsOfTheMask) {
  EXPECT_GE(num_processors(), 1);
  EXPECT_LE(num_processors(), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(ThreadPoolDeathTest, RefusesALoopInsideALoop) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const int threads : {1, 2}) {
    EXPECT_DEATH(
        {
          ThreadPool pool(threads);
          ThreadPool other(1);
          pool.run(4, [&](int64_t, int) { other.run(1, [](int64_t, int) {}); });
        },
        "inside_chunk");
  }
}

TEST(ThreadPoolDeathTest, RefusesNoThreads) {
  EXPECT_DEATH(ThreadPool pool(0), "num_threads >= 1");
}

}  // namespace
}  // namespace clo
