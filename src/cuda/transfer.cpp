#include "cuda/transfer.h"

#include <algorithm>

#include "base/check.h"
#include "base/try.h"
#include "kernels/rows/rows.h"

namespace clo {

namespace {

constexpr int32_t kFetchBlocks = 16;

}  // namespace

Result<std::unique_ptr<CudaTransfer>> CudaTransfer::create() {
  kernels::load_copy_rows();
  CLO_ASSIGN(PinnedBlock list, PinnedBlock::create(kListMoves * int64_t{sizeof(kernels::RowCopy)}));
  return std::unique_ptr<CudaTransfer>(new CudaTransfer(std::move(list)));
}

void CudaTransfer::fetch(std::span<const RowMove> moves, int64_t row_bytes) {
  auto* const list = list_.as<kernels::RowCopy>();
  for (size_t first = 0; first < moves.size(); first += kListMoves) {
    const size_t count = std::min<size_t>(kListMoves, moves.size() - first);
    for (size_t i = 0; i < count; ++i) {
      list[i] = {moves[first + i].source, moves[first + i].target};
    }
    kernels::copy_rows(list, static_cast<int64_t>(count), row_bytes, kFetchBlocks, stream_.get());
    stream_.synchronize();
  }
}

void CudaTransfer::expand(std::span<const RowMove> moves, const KvShape& shape) {
  auto* const list = list_.as<kernels::RowCopy>();
  for (size_t first = 0; first < moves.size(); first += kListMoves) {
    const size_t count = std::min<size_t>(kListMoves, moves.size() - first);
    for (size_t i = 0; i < count; ++i) {
      list[i] = {moves[first + i].source, moves[first + i].target};
    }
    kernels::expand_rows(list, static_cast<int64_t>(count), shape, kFetchBlocks, stream_.get());
    stream_.synchronize();
  }
}

void CudaTransfer::upload(std::byte* target, const void* source, int64_t num_bytes) {
  CLO_CUDA(cudaMemcpyAsync(target, source, static_cast<size_t>(num_bytes), cudaMemcpyHostToDevice,
                           stream_.get()));
  stream_.synchronize();
}

void CudaTransfer::fill(std::byte* target, uint8_t value, int64_t num_bytes) {
  CLO_CUDA(cudaMemsetAsync(target, value, static_cast<size_t>(num_bytes), stream_.get()));
  stream_.synchronize();
}

void CudaTransfer::exchange(std::byte* a, std::byte* b, int64_t num_bytes) {
  constexpr auto kListBytes = kListMoves * int64_t{sizeof(kernels::RowCopy)};
  for (int64_t at = 0; at < num_bytes; at += kListBytes) {
    const auto piece = static_cast<size_t>(std::min(kListBytes, num_bytes - at));
    const auto copy = [&](void* target, const void* source) {
      CLO_CUDA(cudaMemcpyAsync(target, source, piece, cudaMemcpyDefault, stream_.get()));
    };
    copy(list_.as<std::byte>(), a + at);
    copy(a + at, b + at);
    copy(b + at, list_.as<std::byte>());
    stream_.synchronize();
  }
}

}  // namespace clo
