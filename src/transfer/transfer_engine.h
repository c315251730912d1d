#pragma once
// TransferEngine: moves rows from the host store to slots on the device. It sees lists of
// (source, target) and nothing of the policy that made them. Called from the engine thread.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/thread_pool.h"
#include "ops/kv_layout.h"

namespace clo {

struct RowMove {
  const std::byte* source = nullptr;  // a row in the host store
  std::byte* target = nullptr;        // a row in the device arena
};

class TransferEngine {
 public:
  virtual ~TransferEngine() = default;
  virtual std::string name() const = 0;
  // Copies row_bytes for each move. Blocks: until all rows have arrived (an asynchronous engine
  // says otherwise in its own header).
  virtual void fetch(std::span<const RowMove> moves, int64_t row_bytes) = 0;
  // The same for compressed rows whose targets are full rows: expand_to_full() of each. Requires:
  // shape.compressed().
  virtual void expand(std::span<const RowMove> moves, const KvShape& shape) = 0;
  // What admission writes to the device arena: `num_bytes` from host memory (which may be reused
  // when the call returns), or one byte repeated.
  virtual void upload(std::byte* target, const void* source, int64_t num_bytes) = 0;
  virtual void fill(std::byte* target, uint8_t value, int64_t num_bytes) = 0;
  // Two places in the device arena change contents. Requires: they do not overlap.
  virtual void exchange(std::byte* a, std::byte* b, int64_t num_bytes) = 0;
};

// Plain copies by the threads of `pool`, which outlives the engine: that of the CPU backend.
std::unique_ptr<TransferEngine> make_memcpy_engine(ThreadPool& pool);

}  // namespace clo
