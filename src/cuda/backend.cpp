#include "cuda/backend.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"
#include "cuda/buffers.h"
#include "cuda/runner.h"
#include "cuda/transfer.h"
#include "device/device_facts.h"
#include "device/device_memory.h"
#include "kernels/rows/rows.h"

namespace clo {

namespace {

// Of the arenas of all backends alive: no part of what a context holds.
std::atomic<int64_t> arenas_of_process = 0;

class DeviceBackend final : public CudaBackend {
 public:
  DeviceBackend(DeviceFacts facts, std::unique_ptr<CudaTransfer> transfer, int64_t overhead_bytes,
                int host_threads)
      : facts_(std::move(facts)),
        transfer_(std::move(transfer)),
        overhead_bytes_(overhead_bytes),
        host_threads_(host_threads) {}
  ~DeviceBackend() override {
    if (arena_) arenas_of_process -= arena_->budget_bytes();
  }

  std::string description() const override {
    return "cuda (" + facts_.name + ", " + std::to_string(facts_.num_multiprocessors) +
           " multiprocessors)";
  }
  int64_t overhead_bytes() const override { return overhead_bytes_; }
  int64_t free_bytes() const override {
    size_t free_bytes = 0, total_bytes = 0;
    CLO_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    return static_cast<int64_t>(free_bytes);
  }

  Status take_arena(int64_t budget_bytes) override {
    CLO_CHECK(!arena_);
    const int64_t num_bytes =
        (budget_bytes - overhead_bytes_) / Arena::kAlignment * Arena::kAlignment;
    if (num_bytes <= 0) {
      return Error{ErrorCode::kDeviceMemory,
                   "the device budget is " + format_bytes(budget_bytes) +
                       "; the CUDA context and its libraries alone hold " +
                       format_bytes(overhead_bytes_) + "; raise --device-memory",
                   "--device-memory"};
    }
    CLO_ASSIGN(memory_, DeviceBlock::create(num_bytes));
    arena_ = Arena::over("device", memory_.data(), num_bytes, ErrorCode::kDeviceMemory);
    arenas_of_process += num_bytes;
    return Ok{};
  }
  Arena& arena() override {
    CLO_CHECK(arena_.has_value());
    return *arena_;
  }
  TransferEngine& transfer() override { return *transfer_; }

  Status pin(HostStore& store) override {
    CLO_CHECK(store.used_pages() == 0, store.used_pages());
    CLO_CHECK(!arena_);
    const int64_t before = driver_used_bytes();
    CLO_ASSIGN(pinned_, PinnedRange::create(store.arena().base(), store.arena().budget_bytes(),
                                            host_threads_));
    // Page tables of the mapping: about 2 MiB for each GiB.
    if (const int64_t after = driver_used_bytes(); before >= 0 && after >= before) {
      overhead_bytes_ += after - before;
    }
    // The page tables and views hold host addresses, which kernels follow as they are.
    if (pinned_.device_base() != store.arena().base()) {
      return Error{ErrorCode::kDeviceFault,
                   "this device maps host memory at other addresses than the host's; the CUDA "
                   "backend needs unified addressing; use --backend cpu",
                   "--backend"};
    }
    return Ok{};
  }
  double pin_seconds() const override { return pinned_.seconds(); }

  Result<std::unique_ptr<Runner>> make_runner(const Weights& weights, KvSystem& system,
                                              const CudaLimits& limits) override {
    CLO_ASSIGN(std::unique_ptr<CudaRunner> runner,
               CudaRunner::create(weights, system, arena(), limits, description()));
    return std::unique_ptr<Runner>(std::move(runner));
  }

 private:
  DeviceFacts facts_;
  std::unique_ptr<CudaTransfer> transfer_;
  int64_t overhead_bytes_ = 0;
  int host_threads_ = 1;
  DeviceBlock memory_;
  std::optional<Arena> arena_;
  PinnedRange pinned_;
};

BufferSizes buffer_sizes(const ModelConfig& config, const KvShape& shape,
                         const CudaLimits& limits) {
  return {config, shape, limits, device_numbers(), true};
}

}  // namespace

Result<std::unique_ptr<CudaBackend>> CudaBackend::create(int host_threads) {
  // The refresh kernel runs beside the layers: waiting for either to end before the other starts
  // would be for ever.
  for (const auto& [name, harmful] :
       {std::pair{"CUDA_LAUNCH_BLOCKING", "1"}, std::pair{"CUDA_DEVICE_MAX_CONNECTIONS", "1"}}) {
    const char* value = std::getenv(name);
    if (value == nullptr || std::string_view(value) != harmful) continue;
    return Error{
        ErrorCode::kUnsupported,
        std::string(name) + "=" + value + " is set, but kernels must run side by side; unset it",
        "--backend cuda"};
  }
  CLO_ASSIGN(DeviceFacts facts, device_facts());
  const int64_t before = driver_used_at_start();
  CLO_CUDA(cudaSetDevice(0));
  CLO_CUDA(cudaFree(nullptr));
  CLO_ASSIGN(auto transfer, CudaTransfer::create());
  const int64_t after = driver_used_bytes();
  // Without the management library: all that is in use counts as this process's.
  size_t free_bytes = 0, total_bytes = 0;
  CLO_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  const int64_t overhead = before >= 0 && after >= before
                               ? after - before - arenas_of_process
                               : static_cast<int64_t>(total_bytes - free_bytes);
  // What comes later: libraries' handles, plans and code, graphs, the stacks of kernels. Measured
  // on an H200 (docs/measurements.md).
  constexpr int64_t kLibraryBytes = int64_t{416} << 20;
  return std::unique_ptr<CudaBackend>(std::make_unique<DeviceBackend>(
      std::move(facts), std::move(transfer), overhead + kLibraryBytes, host_threads));
}

Status CudaBackend::supports(const KvShape& shape) {
  const auto refuse = [](const std::string& what) {
    return Error{ErrorCode::kUnsupported, what + "; use --backend cpu", "--backend cuda"};
  };
  if (const auto facts = device_facts(); facts && !kernels::has_kernels_for_device()) {
    return refuse("this build has no kernels for compute capability " +
                  std::to_string(facts->capability_major) + "." +
                  std::to_string(facts->capability_minor) + " of " + facts->name +
                  "; build with cmake --preset gpu, which has them from 8.0 on");
  }
  if (shape.type != DType::kBF16 && shape.type != DType::kF16) {
    return refuse("the CUDA backend computes in bf16 or f16; " +
                  std::string(dtype_name(shape.type)) + " was asked for (--dtype bf16 converts)");
  }
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    return refuse("the CUDA backend needs head_dim 64 or 128, the model has " +
                  std::to_string(shape.head_dim));
  }
  if (shape.group_size() > kernels::kMaxGroup) {
    return refuse("the CUDA backend takes at most " + std::to_string(kernels::kMaxGroup) +
                  " query heads per KV head, the model has " + std::to_string(shape.group_size()));
  }
  if (shape.num_kv_heads > 255) {  // a refresh job has 8 bits for it
    return refuse("the CUDA backend takes at most 255 KV heads, the model has " +
                  std::to_string(shape.num_kv_heads));
  }
  if (shape.code_bits < 0 || shape.code_bits > kMaxCodeBits || shape.code_bits % 64 != 0) {
    return refuse("the CUDA backend takes keys of 0 or a multiple of 64 bits up to " +
                  std::to_string(kMaxCodeBits) + ", found " + std::to_string(shape.code_bits));
  }
  // What the refresh kernels' shared memory holds: codes of a group, a bin per distance.
  constexpr int32_t kMaxGroupBits = 2048;
  if (shape.group_size() * shape.code_bits > kMaxGroupBits) {
    return refuse("the CUDA backend takes at most " +
                  std::to_string(kMaxGroupBits / shape.group_size() / 64 * 64) +
                  " bits per key with " + std::to_string(shape.group_size()) +
                  " query heads per KV head, found " + std::to_string(shape.code_bits) +
                  "; lower --bits");
  }
  return Ok{};
}

int64_t CudaBackend::workspace_bytes(const ModelConfig& config, const KvShape& shape,
                                     const CudaLimits& limits) {
  int64_t total = 0;
  StepBuffers buffers;
  const Status counted =
      take_buffers(buffer_sizes(config, shape, limits), buffers, [&](void**, int64_t num_bytes) {
        total += round_up(num_bytes, Arena::kAlignment);
        return Status(Ok{});
      });
  CLO_CHECK(counted.has_value());
  return total;
}

int64_t CudaBackend::largest_chunk(const ModelConfig& config, const KvShape& shape,
                                   CudaLimits limits, int64_t wanted_rows, int64_t budget_bytes) {
  // A chunk is worth halving only down to where products stop filling the device.
  constexpr int64_t kLeast = 512;
  for (int64_t rows = wanted_rows;; rows = std::max(kLeast, rows / 2)) {
    limits.chunk_rows = rows;
    if (rows <= kLeast || workspace_bytes(config, shape, limits) <= budget_bytes) return rows;
  }
}

}  // namespace clo
