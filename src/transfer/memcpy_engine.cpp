#include <algorithm>
#include <cstring>

#include "ops/stored_row.h"
#include "transfer/transfer_engine.h"

namespace clo {

namespace {

class MemcpyEngine final : public TransferEngine {
 public:
  explicit MemcpyEngine(ThreadPool& pool) : pool_(pool) {}

  std::string name() const override { return "memcpy"; }

  void fetch(std::span<const RowMove> moves, int64_t row_bytes) override {
    // Source rows are scattered: asking for them ahead hides most of the wait for memory.
    constexpr int64_t kAhead = 8;
    const int64_t count = std::ssize(moves);
    const RowMove* list = moves.data();
    const auto bytes = static_cast<size_t>(row_bytes);
    // Fewer rows than this are not worth a second thread.
    constexpr int64_t kGrainRows = 128;
    pool_.run_ranges(count, kGrainRows, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (i + kAhead < count) {
          for (int64_t at = 0; at < row_bytes; at += 64) {
            __builtin_prefetch(list[i + kAhead].source + at);
          }
        }
        std::memcpy(list[i].target, list[i].source, bytes);
      }
    });
  }

  void expand(std::span<const RowMove> moves, const KvShape& shape) override {
    constexpr int64_t kGrainRows = 32;
    pool_.run_ranges(std::ssize(moves), kGrainRows, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const RowMove& move = moves[static_cast<size_t>(i)];
        expand_to_full(shape, move.source, move.target);
      }
    });
  }

  void upload(std::byte* target, const void* source, int64_t num_bytes) override {
    std::memcpy(target, source, static_cast<size_t>(num_bytes));
  }
  void fill(std::byte* target, uint8_t value, int64_t num_bytes) override {
    std::memset(target, value, static_cast<size_t>(num_bytes));
  }
  void exchange(std::byte* a, std::byte* b, int64_t num_bytes) override {
    std::swap_ranges(a, a + num_bytes, b);
  }

 private:
  ThreadPool& pool_;
};

}  // namespace

std::unique_ptr<TransferEngine> make_memcpy_engine(ThreadPool& pool) {
  return std::make_unique<MemcpyEngine>(pool);
}

}  // namespace clo
