#include "base/thread_pool.h"

#include <sched.h>

#include "base/check.h"

namespace clo {

namespace {

// The low half of a ticket when no chunk may be taken: larger than any number of chunks.
constexpr uint32_t kClosed = UINT32_MAX;
constexpr uint64_t kLoop = uint64_t{1} << 32;

thread_local bool inside_chunk = false;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `done` came true within `limit`. The clock is read now and then: it costs what several
// pauses cost.
template <typename Done>
bool spin_until(std::chrono::nanoseconds limit, const Done& done) {
  if (done()) return true;
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

int num_processors() {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return std::max(1, CPU_COUNT(&mask));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int num_threads, std::chrono::microseconds spin)
    : spin_(spin), ticket_(kClosed) {
  CLO_CHECK(num_threads >= 1, num_threads);
  workers_.reserve(static_cast<size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  CLO_CHECK(!busy_.load());
  stop_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_erased(int64_t num_chunks, const void* context, Call call) {
  CLO_CHECK(!inside_chunk, num_chunks);
  CLO_CHECK(num_chunks < int64_t{kClosed}, num_chunks);
  if (num_chunks <= 0) return;
  if (workers_.empty() || num_chunks == 1) {
    inside_chunk = true;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) call(context, chunk, 0);
    inside_chunk = false;
    return;
  }
  CLO_CHECK(!busy_.exchange(true, std::memory_order_acquire), num_chunks);
  const auto count = static_cast<uint32_t>(num_chunks);
  // Release, and acquire where they are read: a worker that has seen one of these has seen the
  // ticket closed before, so that it cannot take a chunk of the loop before this one.
  call_.store(call, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  num_chunks_.store(count, std::memory_order_release);
  ended_.store(0, std::memory_order_relaxed);
  const uint64_t loop = (ticket_.load(std::memory_order_relaxed) & ~uint64_t{kClosed}) + kLoop;
  // Sequentially consistent with the counting of sleepers: either the worker sees this ticket
  // before it sleeps, or this thread sees that it sleeps.
  ticket_.store(loop);
  if (sleepers_.load() > 0) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  take_chunks(0);
  wait_for_end(count);
  ticket_.store(loop | kClosed, std::memory_order_release);
  busy_.store(false, std::memory_order_release);
}

bool ThreadPool::has_chunks() const {
  return static_cast<uint32_t>(ticket_.load()) < num_chunks_.load(std::memory_order_acquire);
}

void ThreadPool::take_chunks(int thread) {
  inside_chunk = true;
  uint32_t taken = 0;
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const uint32_t count = num_chunks_.load(std::memory_order_acquire);
    const Call call = call_.load(std::memory_order_acquire);
    const void* context = context_.load(std::memory_order_acquire);
    const auto chunk = static_cast<uint32_t>(ticket);
    if (chunk >= count) break;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    call(context, chunk, thread);
    ++taken;
    ticket = ticket_.load(std::memory_order_acquire);
  }
  inside_chunk = false;
  if (taken == 0) return;
  // Nothing of the loop is touched past this: the caller may have returned.
  ended_.fetch_add(taken);
  if (thread != 0 && caller_sleeps_.load()) ended_.notify_one();
}

void ThreadPool::wait_for_end(uint32_t num_chunks) {
  const auto all_ended = [&] { return ended_.load() == num_chunks; };
  if (spin_until(spin_, all_ended)) return;
  caller_sleeps_.store(true);
  for (uint32_t ended = ended_.load(); ended != num_chunks; ended = ended_.load()) {
    ended_.wait(ended);
  }
  caller_sleeps_.store(false);
}

void ThreadPool::work(int thread) {
  const auto called = [this] { return has_chunks() || stop_.load(); };
  while (!stop_.load()) {
    if (!spin_until(spin_, called)) {
      const uint32_t seen = wake_.load();
      sleepers_.fetch_add(1);
      if (!called()) wake_.wait(seen);
      sleepers_.fetch_sub(1);
      continue;
    }
    take_chunks(thread);
  }
}

}  // namespace clo
