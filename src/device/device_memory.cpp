#include "device/device_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "base/units.h"
#include "device/cuda_error.h"

namespace clo {

namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 30;
constexpr int64_t kTouchBytes = int64_t{64} << 20;

std::string locked_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return format_bytes(static_cast<int64_t>(limit.rlim_cur));
}

// One write per page. Zero is what the pages hold already when they are new; the range is only ever
// pinned before it is used.
void touch(std::byte* base, int64_t num_bytes, int num_threads) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    while (true) {
      const int64_t at = next.fetch_add(kTouchBytes);
      if (at >= num_bytes) return;
      const int64_t end = std::min(at + kTouchBytes, num_bytes);
      for (int64_t i = at; i < end; i += 4096) {
        *reinterpret_cast<volatile std::byte*>(base + i) = std::byte{0};
      }
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
  work();
}

}  // namespace

Result<DeviceBlock> DeviceBlock::create(int64_t num_bytes) {
  DeviceBlock block;
  void* data = nullptr;
  const cudaError_t code = cudaMalloc(&data, static_cast<size_t>(num_bytes));
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    return Error{ErrorCode::kDeviceMemory,
                 "the device refused " + format_bytes(num_bytes) + " (" + cudaGetErrorName(code) +
                     "); " + format_bytes(static_cast<int64_t>(free_bytes)) + " of " +
                     format_bytes(static_cast<int64_t>(total_bytes)) +
                     " are free; lower --device-memory or end what else uses the device",
                 "--device-memory"};
  }
  block.data_ = static_cast<std::byte*>(data);
  block.num_bytes_ = num_bytes;
  return block;
}

DeviceBlock::~DeviceBlock() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

Result<PinnedBlock> PinnedBlock::create(int64_t num_bytes) {
  PinnedBlock block;
  void* data = nullptr;
  const cudaError_t code =
      cudaHostAlloc(&data, static_cast<size_t>(num_bytes), cudaHostAllocMapped);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    return Error{ErrorCode::kHostMemory,
                 "could not pin " + format_bytes(num_bytes) + " of system memory (" +
                     cudaGetErrorName(code) + "); the limit of locked memory is " + locked_limit(),
                 ""};
  }
  block.data_ = static_cast<std::byte*>(data);
  block.num_bytes_ = num_bytes;
  return block;
}

PinnedBlock::~PinnedBlock() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
}

Result<PinnedRange> PinnedRange::create(std::byte* base, int64_t num_bytes, int num_threads) {
  const auto start = std::chrono::steady_clock::now();
  PinnedRange range;
  if (num_bytes == 0) return range;
  // Large pages make both the touching and the device's address translation cheaper.
  (void)madvise(base, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
  for (int64_t at = 0; at < num_bytes; at += kPieceBytes) {
    const int64_t piece = std::min(kPieceBytes, num_bytes - at);
    touch(base + at, piece, num_threads);
    const cudaError_t code = cudaHostRegister(base + at, static_cast<size_t>(piece),
                                              cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (code != cudaSuccess) {
      (void)cudaGetLastError();
      return Error{ErrorCode::kHostMemory,
                   "could not pin the host store: asked for " + format_bytes(num_bytes) +
                       " of system memory, " + format_bytes(at) +
                       " were pinned before the system "
                       "refused (" +
                       cudaGetErrorName(code) + "); the limit of locked memory is " +
                       locked_limit() + "; lower --host-memory, or raise the limit (ulimit -l)",
                   "--host-memory"};
    }
    range.pieces_.push_back(base + at);
  }
  void* device_base = nullptr;
  CLO_CUDA(cudaHostGetDevicePointer(&device_base, base, 0));
  range.device_base_ = static_cast<std::byte*>(device_base);
  range.seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return range;
}

PinnedRange::~PinnedRange() {
  for (std::byte* piece : pieces_) (void)cudaHostUnregister(piece);
}

}  // namespace clo
