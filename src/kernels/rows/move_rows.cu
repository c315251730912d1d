// Plain movement of rows, between device memory and mapped host memory or inside either. A few
// blocks keep the link full (4 of 1024 threads with 128 bytes a thread on the way), so
// that the multiprocessors stay with the kernels that compute.
#include "base/check.h"
#include "kernels/launch.cuh"
#include "kernels/rows/offsets.h"
#include "kernels/rows/rows.h"
#include "kernels/rows/stored_rows.cuh"
#include "kernels/rules.cuh"

namespace clo::kernels {

namespace {

constexpr int kMoveThreads = 512;
constexpr int kInFlight = 8;  // pieces of 16 bytes that a thread has on the way

// All threads of the block copy `count` consecutive pieces.
template <typename Piece>
__device__ __forceinline__ void copy_run(Piece* target, const Piece* source, int32_t count) {
  for (int32_t first = static_cast<int32_t>(threadIdx.x); first < count;
       first += kMoveThreads * kInFlight) {
    Piece pieces[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t at = first + i * kMoveThreads;
      if (at < count) pieces[i] = __ldcs(source + at);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t at = first + i * kMoveThreads;
      if (at < count) __stcs(target + at, pieces[i]);
    }
  }
}

__global__ void __launch_bounds__(kMoveThreads)
    move_pages_kernel(const __grid_constant__ MovePages p, int32_t row_pieces) {
  launch_dependents();
  wait_for_predecessor();
  const KvShape& shape = p.layout.shape;
  const int32_t kv_heads = shape.num_kv_heads, words = shape.code_bits / 64;
  const int32_t num_runs = num_page_runs(p.first_token, p.end_token, kv_heads);
  const bool codes = p.host_codes != nullptr && p.code_blocks != nullptr && words > 0;
  for (auto i = static_cast<int32_t>(blockIdx.x); i < num_runs;
       i += static_cast<int32_t>(gridDim.x)) {
    const PageRun run = page_run(i, p.first_token, p.end_token, kv_heads, p.layer_capacity);
    const int64_t host_index = host_row_index(p.layout.num_pages, kv_heads, p.layer,
                                              p.pages[run.page], run.kv_head, run.first_slot);
    auto* host = reinterpret_cast<uint4*>(p.host_rows) + host_index * row_pieces;
    auto* buffer = reinterpret_cast<uint4*>(p.layer_rows) + run.buffer_row * row_pieces;
    copy_run(p.to_host ? host : buffer, p.to_host ? buffer : host, run.num_tokens * row_pieces);
    if (!codes) continue;
    auto* host_code = reinterpret_cast<unsigned long long*>(p.host_codes) + host_index * words;
    auto* block_code = reinterpret_cast<unsigned long long*>(p.code_blocks[run.page]) +
                       block_code_index(kv_heads, p.layer, run.kv_head, run.first_slot) * words;
    copy_run(p.to_host ? host_code : block_code, p.to_host ? block_code : host_code,
             run.num_tokens * words);
  }
}

// Full rows of the layer buffer and compressed ones of the store: head_dim / 4 lanes a row, several
// rows of theirs under way.
constexpr int kRowsInFlight = 8;

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kMoveThreads)
    move_compressed_pages_kernel(const __grid_constant__ MovePages p) {
  constexpr int kRowLanes = kHeadDim / 4, kRowsAtOnce = kMoveThreads / kRowLanes;
  launch_dependents();
  wait_for_predecessor();
  const KvShape& shape = p.layout.shape;
  const int32_t kv_heads = shape.num_kv_heads, words = shape.code_bits / 64;
  const int32_t num_runs = num_page_runs(p.first_token, p.end_token, kv_heads);
  const bool codes = p.host_codes != nullptr && p.code_blocks != nullptr && words > 0;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const auto own = static_cast<int32_t>(threadIdx.x) / kRowLanes;
  const int64_t stored_bytes = stored_row_bytes(shape);
  for (auto i = static_cast<int32_t>(blockIdx.x); i < num_runs;
       i += static_cast<int32_t>(gridDim.x)) {
    const PageRun run = page_run(i, p.first_token, p.end_token, kv_heads, p.layer_capacity);
    const int64_t host_index = host_row_index(p.layout.num_pages, kv_heads, p.layer,
                                              p.pages[run.page], run.kv_head, run.first_slot);
    std::byte* const host = p.host_rows + host_index * stored_bytes;
    auto* const buffer = reinterpret_cast<uint4*>(p.layer_rows) + run.buffer_row * kRowLanes + lane;
    for (int32_t first = 0; first < run.num_tokens; first += kRowsAtOnce * kRowsInFlight) {
      uint4 pieces[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int32_t row = first + r * kRowsAtOnce + own;
        if (row >= run.num_tokens) continue;
        pieces[r] = p.to_host ? __ldcs(buffer + row * kRowLanes)
                              : load_expanded<Element, kHeadDim / 8>(host + row * stored_bytes,
                                                                     shape.stored, lane);
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int32_t row = first + r * kRowsAtOnce + own;
        const bool there = row < run.num_tokens;
        if (p.to_host) {
          const StoredPiece stored =
              compress_piece<Element, kHeadDim / 8>(shape.stored, there ? pieces[r] : uint4{});
          store_piece<kHeadDim / 8>(there ? host + row * stored_bytes : nullptr, shape.stored,
                                    stored, lane);
        } else if (there) {
          __stcs(buffer + row * kRowLanes, pieces[r]);
        }
      }
    }
    if (!codes) continue;
    auto* host_code = reinterpret_cast<unsigned long long*>(p.host_codes) + host_index * words;
    auto* block_code = reinterpret_cast<unsigned long long*>(p.code_blocks[run.page]) +
                       block_code_index(kv_heads, p.layer, run.kv_head, run.first_slot) * words;
    copy_run(p.to_host ? host_code : block_code, p.to_host ? block_code : host_code,
             run.num_tokens * words);
  }
}

// Listed stored rows to full ones.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kMoveThreads)
    expand_rows_kernel(const RowCopy* copies, int64_t count, const KvShape shape) {
  constexpr int kRowLanes = kHeadDim / 4;
  launch_dependents();
  wait_for_predecessor();
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kMoveThreads / kRowLanes);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kMoveThreads + threadIdx.x) / kRowLanes;
       i < count; i += step) {
    reinterpret_cast<uint4*>(copies[i].target)[lane] =
        load_expanded<Element, kHeadDim / 8>(copies[i].source, shape.stored, lane);
  }
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kMoveThreads)
    expand_resident_kernel(const __grid_constant__ ExpandResident p) {
  constexpr int kRowLanes = kHeadDim / 4;
  launch_dependents();
  wait_for_predecessor();
  const auto kv_head = static_cast<int64_t>(blockIdx.y);
  const std::byte* const rows = p.heads[kv_head].resident;
  auto* const out = reinterpret_cast<uint4*>(p.layer_rows) + kv_head * p.layer_capacity * kRowLanes;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kMoveThreads / kRowLanes);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kMoveThreads + threadIdx.x) / kRowLanes;
       i < p.num_tokens; i += step) {
    out[i * kRowLanes + lane] = load_expanded<Element, kHeadDim / 8>(
        rows + i * stored_row_bytes(p.shape), p.shape.stored, lane);
  }
}

// A warp takes 32 copies, their pieces side by side: lane l copies pieces l, l + 32, ... of the
// copies laid end to end.
constexpr int kCopyThreads = 256;

__global__ void __launch_bounds__(kCopyThreads)
    copy_rows_kernel(const RowCopy* copies, int64_t count, int32_t row_pieces) {
  launch_dependents();
  wait_for_predecessor();
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kCopyThreads / 32);
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (kCopyThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  for (int64_t first = warp * 32; first < count; first += warps * 32) {
    const auto listed = static_cast<int32_t>(count - first < 32 ? count - first : 32);
    unsigned long long source = 0, target = 0;
    if (lane < listed) {
      const RowCopy copy = copies[first + lane];
      source = reinterpret_cast<unsigned long long>(copy.source);
      target = reinterpret_cast<unsigned long long>(copy.target);
    }
    const int32_t pieces = listed * row_pieces;
    for (int32_t base = 0; base < pieces; base += 32 * kInFlight) {
      uint4 value[kInFlight];
      uint4* to[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int32_t at = base + i * 32 + lane;
        const int row = at / row_pieces % 32;
        const auto* from =
            reinterpret_cast<const uint4*>(__shfl_sync(kAll, source, row)) + at % row_pieces;
        to[i] = reinterpret_cast<uint4*>(__shfl_sync(kAll, target, row)) + at % row_pieces;
        if (at < pieces) value[i] = __ldcs(from);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (base + i * 32 + lane < pieces) __stcs(to[i], value[i]);
      }
    }
  }
}

}  // namespace

void move_pages(const MovePages& params, cudaStream_t stream) {
  CLO_CHECK(params.num_blocks >= 1, params.num_blocks);
  if (params.end_token <= params.first_token) return;
  const KvShape& shape = params.layout.shape;
  if (shape.compressed()) {
    with_element(shape.type, [&]<typename Element>(Element) {
      launch(shape.head_dim == 64 ? move_compressed_pages_kernel<Element, 64>
                                  : move_compressed_pages_kernel<Element, 128>,
             dim3(static_cast<unsigned>(params.num_blocks)), dim3(kMoveThreads), 0, stream, params);
    });
    return;
  }
  launch(move_pages_kernel, dim3(static_cast<unsigned>(params.num_blocks)), dim3(kMoveThreads), 0,
         stream, params, static_cast<int32_t>(params.layout.shape.row_bytes() / 16));
}

void expand_rows(const RowCopy* copies, int64_t count, const KvShape& shape, int32_t num_blocks,
                 cudaStream_t stream) {
  CLO_CHECK(shape.compressed() && num_blocks >= 1, num_blocks);
  if (count <= 0) return;
  with_element(shape.type, [&]<typename Element>(Element) {
    launch(
        shape.head_dim == 64 ? expand_rows_kernel<Element, 64> : expand_rows_kernel<Element, 128>,
        dim3(static_cast<unsigned>(num_blocks)), dim3(kMoveThreads), 0, stream, copies, count,
        shape);
  });
}

void expand_resident(const ExpandResident& params, cudaStream_t stream) {
  const KvShape& shape = params.shape;
  CLO_CHECK(shape.compressed() && params.num_tokens <= params.layer_capacity, params.num_tokens);
  if (params.num_tokens <= 0) return;
  constexpr unsigned kBlocks = 16;  // of a head
  with_element(shape.type, [&]<typename Element>(Element) {
    launch(shape.head_dim == 64 ? expand_resident_kernel<Element, 64>
                                : expand_resident_kernel<Element, 128>,
           dim3(kBlocks, static_cast<unsigned>(shape.num_kv_heads)), dim3(kMoveThreads), 0, stream,
           params);
  });
}

bool has_kernels_for_device() {
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(&attributes, copy_rows_kernel);
  if (code != cudaSuccess) (void)cudaGetLastError();
  return code != cudaErrorNoKernelImageForDevice && code != cudaErrorInvalidDeviceFunction;
}

void load_copy_rows() {
  cudaFuncAttributes attributes;
  CLO_CUDA(cudaFuncGetAttributes(&attributes, copy_rows_kernel));
  for (const DType type : {DType::kBF16, DType::kF16}) {
    with_element(type, [&]<typename Element>(Element) {
      CLO_CUDA(cudaFuncGetAttributes(&attributes, expand_rows_kernel<Element, 64>));
      CLO_CUDA(cudaFuncGetAttributes(&attributes, expand_rows_kernel<Element, 128>));
    });
  }
}

void copy_rows(const RowCopy* copies, int64_t count, int64_t row_bytes, int32_t num_blocks,
               cudaStream_t stream) {
  CLO_CHECK(row_bytes > 0 && row_bytes % 16 == 0, row_bytes);
  CLO_CHECK(num_blocks >= 1, num_blocks);
  if (count <= 0) return;
  launch(copy_rows_kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kCopyThreads), 0, stream,
         copies, count, static_cast<int32_t>(row_bytes / 16));
}

}  // namespace clo::kernels
