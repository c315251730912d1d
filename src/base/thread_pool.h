#pragma once
// ThreadPool: threads for the short parallel loops of a step. One loop at a time is cut into
// chunks; whoever is free takes the next one, the calling thread too. A thread that the system has
// put aside therefore holds up no more than the chunk it has begun, and on a busy machine the
// caller may well do all of them. No loop allocates. Owned by the engine; run() is for one thread
// at a time. It does not pin threads, and a chunk must not throw.
//
// States of the pool, all changed by run() alone (workers only take chunks):
//
//   idle -> open       the loop is published; sleeping workers are woken
//   open -> draining   the last chunk is taken
//   draining -> idle   the last chunk has ended
//
// States of a worker: spinning -> working (a loop is open) -> spinning -> asleep (kSpin has passed
// without one) -> spinning (woken). The caller that waits for the last chunk sleeps likewise.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/units.h"

namespace clo {

// Processors that this process may run on: the affinity mask counts, not the machine.
int num_processors();

class ThreadPool {
 public:
  // How long a thread that waits spins before it sleeps. A loop that finds its workers spinning
  // costs 0.5 us more than its chunks, one that must wake them 8 us (two threads, measured); the
  // serial parts between the loops of a decode step are shorter than this.
  static constexpr std::chrono::microseconds kSpin{50};

  // num_threads counts the caller: one less is started. Requires: num_threads >= 1.
  explicit ThreadPool(int num_threads, std::chrono::microseconds spin = kSpin);
  // Requires: no loop is running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(chunk, thread) once for each chunk in [0, num_chunks); `thread` in
  // [0, num_threads()) is the one it runs on, 0 the caller's. What the chunks wrote is visible when
  // run returns. Requires: not inside a chunk of any pool; num_chunks < 2^32 - 1.
  // Blocks: until every chunk has ended.
  template <typename Body>
  void run(int64_t num_chunks, const Body& body) {
    run_erased(num_chunks, &body, [](const void* context, int64_t chunk, int thread) {
      (*static_cast<const Body*>(context))(chunk, thread);
    });
  }

  // Calls body(first, last) for ranges that cover [0, count) once: multiples of `grain` long but
  // for the last, and no more than kRangesPerThread of them for each thread. One range, when count
  // is no more than grain, runs on the caller alone.
  static constexpr int64_t kRangesPerThread = 4;
  template <typename Body>
  void run_ranges(int64_t count, int64_t grain, const Body& body) {
    if (count <= 0) return;
    const int64_t most = num_threads() == 1 ? 1 : kRangesPerThread * num_threads();
    const int64_t ranges = std::min(divide_up(count, grain), most);
    const int64_t length = round_up(divide_up(count, ranges), grain);
    run(divide_up(count, length),
        [&](int64_t chunk, int) { body(chunk * length, std::min((chunk + 1) * length, count)); });
  }

 private:
  using Call = void (*)(const void* context, int64_t chunk, int thread);

  void run_erased(int64_t num_chunks, const void* context, Call call);
  void work(int thread);         // a worker's life
  void take_chunks(int thread);  // until none is left
  bool has_chunks() const;
  void wait_for_end(uint32_t num_chunks);

  std::chrono::nanoseconds spin_;
  // [loop number | next chunk]. A chunk is taken by adding one; that fails when a newer loop has
  // been opened since, so nobody takes a chunk of a loop whose fields it has not read.
  alignas(64) std::atomic<uint64_t> ticket_;
  // Of the loop at hand. Written only while the ticket is closed.
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<uint32_t> num_chunks_{0};
  std::atomic<bool> busy_{false};
  alignas(64) std::atomic<uint32_t> ended_{0};  // chunks that have ended
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> wake_{0};  // what sleeping workers wait on
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace clo
