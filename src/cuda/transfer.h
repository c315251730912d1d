#pragma once
// The transfer engine of admission on a GPU: rows of a stored prefix come back by a kernel that
// reads the pinned host store. Decode does not use it: there the refresh kernels fetch by
// themselves.
#include <memory>

#include "device/device_memory.h"
#include "device/stream.h"
#include "transfer/transfer_engine.h"

namespace clo {

class CudaTransfer final : public TransferEngine {
 public:
  static Result<std::unique_ptr<CudaTransfer>> create();

  std::string name() const override { return "gpu gather"; }
  // Blocks: until all rows have arrived.
  void fetch(std::span<const RowMove> moves, int64_t row_bytes) override;
  void expand(std::span<const RowMove> moves, const KvShape& shape) override;
  void upload(std::byte* target, const void* source, int64_t num_bytes) override;
  void fill(std::byte* target, uint8_t value, int64_t num_bytes) override;
  void exchange(std::byte* a, std::byte* b, int64_t num_bytes) override;

 private:
  // Moves listed at a time; the list lies in pinned memory that the kernel reads.
  static constexpr int64_t kListMoves = int64_t{1} << 20;

  explicit CudaTransfer(PinnedBlock list) : list_(std::move(list)) {}

  PinnedBlock list_;
  Stream stream_;
};

}  // namespace clo
