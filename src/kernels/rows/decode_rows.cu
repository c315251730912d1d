// One warp per (row, head): a query head is normalised and rotated; a KV head too, and its row and
// code go to every place that keeps them. A few hundred warps at most: the kernel lasts as long as
// its longest chain of loads, so what does not depend on the kernel before is loaded ahead of it.
#include "base/check.h"
#include "kernels/launch.cuh"
#include "kernels/rows/encode.cuh"
#include "kernels/rows/head_math.cuh"
#include "kernels/rows/offsets.h"
#include "kernels/rows/rows.h"
#include "kernels/rules.cuh"

namespace clo::kernels {

namespace {

constexpr int kWarps = 4;

// Heads of a projection: parts [splits][rows][heads * head_dim], summed in order, then the bias.
struct Projection {
  const float* parts;
  const float* bias;
  int64_t row_stride;    // elements of a row
  int64_t split_stride;  // elements of a part
  int32_t splits;
};

template <int kElements>
__device__ __forceinline__ void load_head(float (&x)[kElements], const Projection& p, int32_t row,
                                          int32_t head, const float (&bias)[kElements], int lane) {
  const float* source =
      p.parts + row * p.row_stride + static_cast<int64_t>(head) * (32 * kElements);
  load_strided(x, source, lane);
  for (int32_t s = 1; s < p.splits; ++s) {
    float more[kElements];
    load_strided(more, source + s * p.split_stride, lane);
#pragma unroll
    for (int e = 0; e < kElements; ++e) x[e] = __fadd_rn(x[e], more[e]);
  }
  if (p.bias == nullptr) return;
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = __fadd_rn(x[e], bias[e]);
}

// The constants of one head, loaded before the kernel waits.
template <int kElements>
struct HeadConstants {
  float bias[kElements] = {};
  float norm[kElements] = {};

  __device__ __forceinline__ HeadConstants(const float* bias_of_head, const float* norm_weight,
                                           int lane) {
    if (bias_of_head != nullptr) load_strided(bias, bias_of_head, lane);
    if (norm_weight != nullptr) load_strided(norm, norm_weight, lane);
  }
};

// A row [K | V] in shared memory goes to `target` in pieces of 16 bytes, a whole row at once.
template <int kRowBytes>
__device__ __forceinline__ void store_row(std::byte* target, const uint4& piece, int lane) {
  if (lane * 16 < kRowBytes) reinterpret_cast<uint4*>(target)[lane] = piece;
}

template <int kElements>
__global__ void __launch_bounds__(32 * kWarps, 1)
    decode_rows_kernel(const __grid_constant__ DecodeRows p) {
  constexpr int kHeadDim = 32 * kElements;
  constexpr int kRowBytes = 4 * kHeadDim;
  __shared__ __align__(16) uint16_t rows[kWarps][2 * kHeadDim];
  launch_dependents();
  const DecodeTables& t = p.tables;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t q_heads = t.shape.num_q_heads, kv_heads = t.shape.num_kv_heads;
  const int32_t index = static_cast<int32_t>(blockIdx.x) * kWarps + warp;
  const int32_t row = index / (q_heads + kv_heads), head = index % (q_heads + kv_heads);
  const bool is_query = head < q_heads;
  const int32_t kv_head = head - q_heads;
  const bool in_range = row < p.rows;

  const auto bias_at = [&](int32_t of_head) {
    return p.bias == nullptr ? nullptr : p.bias + static_cast<int64_t>(of_head) * kHeadDim;
  };
  const HeadConstants<kElements> constants(bias_at(head), is_query ? p.q_norm : p.k_norm, lane);
  wait_for_predecessor();
  if (!in_range) return;
  const int32_t slot_index = t.row_slot[row];
  if (slot_index < 0) return;
  const BatchSlot& slot = t.slots[slot_index];

  const int64_t width = static_cast<int64_t>(q_heads + 2 * kv_heads) * kHeadDim;
  const Projection projection{p.parts, p.bias, width, width * p.rows, p.splits};
  float x[kElements], cosine[kElements / 2], sine[kElements / 2];
  load_head(x, projection, row, head, constants.bias, lane);
  load_strided(cosine, p.cosine + static_cast<int64_t>(row) * (kHeadDim / 2), lane);
  load_strided(sine, p.sine + static_cast<int64_t>(row) * (kHeadDim / 2), lane);
  if (slot.active == 0) return;
  if ((is_query ? p.q_norm : p.k_norm) != nullptr) {
    norm_head(x, constants.norm, p.norm_epsilon);
  }
  rotate_head(x, cosine, sine);
  if (is_query) {
    float* out = p.queries + (static_cast<int64_t>(row) * q_heads + head) * kHeadDim;
#pragma unroll
    for (int e = 0; e < kElements; ++e) out[e * 32 + lane] = x[e];
    return;
  }

  // K is rounded first: the code is that of the stored key.
  float value[kElements];
  {
    const HeadConstants<kElements> of_value(bias_at(head + kv_heads), nullptr, lane);
    load_head(value, projection, row, head + kv_heads, of_value.bias, lane);
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const uint16_t key = bf16_bits(x[e]);
    rows[warp][e * 32 + lane] = key;
    rows[warp][kHeadDim + e * 32 + lane] = bf16_bits(value[e]);
    x[e] = bf16_value(key);
  }
  __syncwarp();
  const uint4 piece =
      lane * 16 < kRowBytes ? reinterpret_cast<const uint4*>(rows[warp])[lane] : uint4{};

  const int64_t position = slot.num_tokens;
  // A step launched ahead may run past a sequence's end; nothing of it may be written elsewhere.
  if (position >= slot.capacity_tokens) return;
  const HeadCacheView& view = t.heads[table_index(t, slot_index, p.layer, kv_head)];
  if (view.resident != nullptr) {
    store_row<kRowBytes>(view.resident + position * kRowBytes, piece, lane);
  } else {
    if (position < view.sink_tokens) {
      store_row<kRowBytes>(view.sink + position * kRowBytes, piece, lane);
    }
    if (view.ring_tokens > 0) {
      // In 32 bits: a 64-bit division is a call.
      const int64_t ring_row = static_cast<int32_t>(position) % view.ring_tokens;
      store_row<kRowBytes>(view.ring + ring_row * kRowBytes, piece, lane);
    }
  }
  const int64_t page_index = position / kPageTokens;
  const auto page_slot = static_cast<int32_t>(position % kPageTokens);
  const int64_t host_index = slot.pages == nullptr
                                 ? -1
                                 : host_row_index(t.host.num_pages, kv_heads, p.layer,
                                                  slot.pages[page_index], kv_head, page_slot);
  if (host_index >= 0) store_row<kRowBytes>(t.host_rows + host_index * kRowBytes, piece, lane);

  const bool host_code = host_index >= 0 && t.host_codes != nullptr;
  if (t.hashes == nullptr || (!host_code && slot.code_blocks == nullptr)) return;
  const uint32_t word =
      encode_warp(t.hashes[static_cast<int64_t>(p.layer) * kv_heads + kv_head], x, lane);
  const int64_t words = t.shape.code_bits / 32;
  if (lane >= words) return;
  if (host_code) reinterpret_cast<uint32_t*>(t.host_codes)[host_index * words + lane] = word;
  if (slot.code_blocks != nullptr) {
    auto* block = reinterpret_cast<uint32_t*>(slot.code_blocks[page_index]);
    block[block_code_index(kv_heads, p.layer, kv_head, page_slot) * words + lane] = word;
  }
}

template <int kElements>
__global__ void __launch_bounds__(32 * kWarps, 1)
    predicted_queries_kernel(const __grid_constant__ PredictedQueries p) {
  constexpr int kHeadDim = 32 * kElements;
  launch_dependents();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t index =
      static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int32_t row = index / p.shape.num_q_heads, head = index % p.shape.num_q_heads;
  const HeadConstants<kElements> constants(
      p.bias == nullptr ? nullptr : p.bias + static_cast<int64_t>(head) * kHeadDim, p.q_norm, lane);
  wait_for_predecessor();
  if (row >= p.rows) return;
  const int64_t width = static_cast<int64_t>(p.shape.num_q_heads) * kHeadDim;
  float x[kElements], cosine[kElements / 2], sine[kElements / 2];
  load_head(x, Projection{p.parts, p.bias, width, width * p.rows, p.splits}, row, head,
            constants.bias, lane);
  load_strided(cosine, p.cosine + static_cast<int64_t>(row) * (kHeadDim / 2), lane);
  load_strided(sine, p.sine + static_cast<int64_t>(row) * (kHeadDim / 2), lane);
  if (p.q_norm != nullptr) norm_head(x, constants.norm, p.norm_epsilon);
  rotate_head(x, cosine, sine);
  float* out = p.queries + row * width + static_cast<int64_t>(head) * kHeadDim;
#pragma unroll
  for (int e = 0; e < kElements; ++e) out[e * 32 + lane] = x[e];
}

unsigned blocks_for(int64_t warps) { return static_cast<unsigned>((warps + kWarps - 1) / kWarps); }

}  // namespace

void decode_rows(const DecodeRows& params, cudaStream_t stream) {
  const KvShape& shape = params.tables.shape;
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  CLO_CHECK(shape.type == DType::kBF16, static_cast<int>(shape.type));
  CLO_CHECK(params.rows >= 1 && params.splits >= 1, params.rows, params.splits);
  const int64_t warps = int64_t{params.rows} * (shape.num_q_heads + shape.num_kv_heads);
  launch(shape.head_dim == 64 ? decode_rows_kernel<2> : decode_rows_kernel<4>,
         dim3(blocks_for(warps)), dim3(32 * kWarps), 0, stream, params);
}

void predicted_queries(const PredictedQueries& params, cudaStream_t stream) {
  CLO_CHECK(params.shape.head_dim == 64 || params.shape.head_dim == 128, params.shape.head_dim);
  CLO_CHECK(params.rows >= 1 && params.splits >= 1, params.rows, params.splits);
  launch(params.shape.head_dim == 64 ? predicted_queries_kernel<2> : predicted_queries_kernel<4>,
         dim3(blocks_for(int64_t{params.rows} * params.shape.num_q_heads)), dim3(32 * kWarps), 0,
         stream, params);
}

}  // namespace clo::kernels
