// A prefill chunk: one warp takes two query heads of a row, or K and V of one KV head. Heads come
// in and go out in pieces of 16 bytes; in between they pass through shared memory into the strided
// order that rotation and code want.
#include "base/check.h"
#include "kernels/element.cuh"
#include "kernels/launch.cuh"
#include "kernels/rows/encode.cuh"
#include "kernels/rows/head_math.cuh"
#include "kernels/rows/offsets.h"
#include "kernels/rows/rows.h"
#include "kernels/rows/stored_rows.cuh"
#include "kernels/rules.cuh"

namespace clo::kernels {

namespace {

constexpr int kWarps = 8;

template <typename Element, int kElements>
__device__ __forceinline__ void load_pair(float (&x)[kElements], const uint16_t* head, int lane) {
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = Element::value(head[e * 32 + lane]);
}

template <typename Element, int kElements>
__global__ void __launch_bounds__(32 * kWarps, 4)
    chunk_rows_kernel(const __grid_constant__ ChunkRows p) {
  constexpr int kHeadDim = 32 * kElements;
  constexpr int kPieces = kHeadDim / 8;  // of 16 bytes in a head
  __shared__ __align__(16) uint16_t heads[kWarps][2][kHeadDim];
  launch_dependents();
  wait_for_predecessor();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t q_heads = p.shape.num_q_heads, kv_heads = p.shape.num_kv_heads;
  const int32_t query_items = (q_heads + 1) / 2;
  // In 32 bits: a 64-bit division is a call.
  const int32_t index = static_cast<int32_t>(blockIdx.x) * kWarps + warp;
  const int64_t row = index / (query_items + kv_heads);
  const int32_t item = index % (query_items + kv_heads);
  if (row >= p.rows) return;
  const bool is_query = item < query_items;
  const int32_t kv_head = item - query_items;

  // The two heads, as numbers in the projection's output, and the piece of one that is this lane's.
  const int32_t first = is_query ? 2 * item : q_heads + kv_head;
  const int32_t second = is_query ? first + 1 : first + kv_heads;
  const bool has_second = !is_query || second < q_heads;
  const int part = lane / kPieces, piece = lane % kPieces;
  const bool mine = part == 0 || (part == 1 && has_second);
  auto* const staged = reinterpret_cast<uint4*>(heads[warp]);
  const auto* qkv = static_cast<const uint4*>(p.qkv) + row * (q_heads + 2 * kv_heads) * kPieces;
  if (mine) {
    staged[part * kPieces + piece] =
        __ldcs(qkv + static_cast<int64_t>(part == 0 ? first : second) * kPieces + piece);
  }
  float cosine[kElements / 2], sine[kElements / 2], norm[kElements];
  load_strided(cosine, p.cosine + row * (kHeadDim / 2), lane);
  load_strided(sine, p.sine + row * (kHeadDim / 2), lane);
  const float* norm_weight = is_query ? p.q_norm : p.k_norm;
  if (norm_weight != nullptr) load_strided(norm, norm_weight, lane);
  __syncwarp();

  float x[kElements];
  for (int h = 0; h < (is_query && has_second ? 2 : 1); ++h) {
    uint16_t* head = heads[warp][h];
    load_pair<Element>(x, head, lane);
    if (norm_weight != nullptr) norm_head(x, norm, p.norm_epsilon);
    rotate_head(x, cosine, sine);
    if (is_query && p.last_query != nullptr && row == p.rows - 1) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        p.last_query[static_cast<int64_t>(first + h) * kHeadDim + e * 32 + lane] = x[e];
      }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const uint16_t bits = Element::bits(x[e]);
      head[e * 32 + lane] = bits;
      x[e] = Element::value(bits);  // the code is that of the full row's key
    }
  }
  __syncwarp();
  if (is_query) {
    auto* out = static_cast<uint4*>(p.queries) + (row * q_heads + first) * kPieces;
    if (mine) out[lane] = staged[lane];  // the two heads are neighbours
    return;
  }
  const int64_t token = p.first_token + row;
  auto* out =
      reinterpret_cast<uint4*>(p.layer_rows) + (kv_head * p.layer_capacity + token) * (2 * kPieces);
  if (mine) out[lane] = staged[lane];
  if (p.hashes == nullptr || p.code_blocks == nullptr) return;
  const uint32_t word = encode_warp(p.hashes[kv_head], x, true, lane);
  const int64_t words = p.shape.code_bits / 32;
  if (lane >= words) return;
  auto* block = reinterpret_cast<uint32_t*>(p.code_blocks[token / kPageTokens]);
  const auto slot = static_cast<int32_t>(token % kPageTokens);
  block[block_code_index(kv_heads, p.layer, kv_head, slot) * words + lane] = word;
}

// One block per kStoreTokens tokens and head. 16 bytes a thread; a row is read once however many
// places it goes to.
constexpr int kStoreTokens = 64;
constexpr int kStoreThreads = 256;

__global__ void __launch_bounds__(kStoreThreads)
    store_chunk_kernel(const __grid_constant__ StoreChunk p, int32_t row_pieces) {
  launch_dependents();
  wait_for_predecessor();
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const HeadCacheView& view = p.heads[kv_head];
  const int64_t begin = p.first_token + static_cast<int64_t>(blockIdx.x) * kStoreTokens;
  const int64_t rest = p.first_token + p.rows - begin;
  const auto tokens = static_cast<int32_t>(rest < kStoreTokens ? rest : kStoreTokens);
  const auto* source = reinterpret_cast<const uint4*>(p.layer_rows) +
                       (kv_head * p.layer_capacity + begin) * row_pieces;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < tokens * row_pieces; i += kStoreThreads) {
    const int64_t token = begin + i / row_pieces;
    const int32_t piece = i % row_pieces;
    if (view.resident != nullptr) {
      reinterpret_cast<uint4*>(view.resident)[token * row_pieces + piece] = source[i];
      continue;
    }
    const bool in_sink = token < view.sink_tokens;
    // Of a long run only the last ring_tokens rows stay; earlier ones would be overwritten.
    const bool in_ring = token + view.ring_tokens >= p.end_token && view.ring_tokens > 0;
    if (!in_sink && !in_ring) continue;
    const uint4 value = source[i];
    if (in_sink) reinterpret_cast<uint4*>(view.sink)[token * row_pieces + piece] = value;
    if (in_ring) {
      reinterpret_cast<uint4*>(
          view.ring)[int64_t{static_cast<int32_t>(token) % view.ring_tokens} * row_pieces + piece] =
          value;
    }
  }
}

// The same where stored rows are compressed: a resident head's rows are, and it has sink and ring
// too. head_dim / 4 lanes a row.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kStoreThreads)
    store_compressed_chunk_kernel(const __grid_constant__ StoreChunk p) {
  constexpr int kRowLanes = kHeadDim / 4, kRowsAtOnce = kStoreThreads / kRowLanes;
  launch_dependents();
  wait_for_predecessor();
  const auto kv_head = static_cast<int32_t>(blockIdx.y);
  const HeadCacheView& view = p.heads[kv_head];
  const int64_t begin = p.first_token + static_cast<int64_t>(blockIdx.x) * kStoreTokens;
  const int64_t rest = p.first_token + p.rows - begin;
  const auto tokens = static_cast<int32_t>(rest < kStoreTokens ? rest : kStoreTokens);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const auto* source = reinterpret_cast<const uint4*>(p.layer_rows) +
                       (kv_head * p.layer_capacity + begin) * kRowLanes;
  const int64_t stored_bytes = stored_row_bytes(p.shape);
  for (int32_t first = 0; first < tokens; first += kRowsAtOnce) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x) / kRowLanes;
    const bool there = row < tokens;
    const uint4 value = there ? source[row * kRowLanes + lane] : uint4{};
    const int64_t token = begin + row;
    if (view.resident != nullptr) {  // the same in the whole block
      const StoredPiece stored = compress_piece<Element, kHeadDim / 8>(p.shape.stored, value);
      store_piece<kHeadDim / 8>(there ? view.resident + token * stored_bytes : nullptr,
                                p.shape.stored, stored, lane);
    }
    if (!there) continue;
    if (token < view.sink_tokens) {
      reinterpret_cast<uint4*>(view.sink)[token * kRowLanes + lane] = value;
    }
    if (token + view.ring_tokens >= p.end_token && view.ring_tokens > 0) {
      reinterpret_cast<uint4*>(
          view.ring)[int64_t{static_cast<int32_t>(token) % view.ring_tokens} * kRowLanes + lane] =
          value;
    }
  }
}

}  // namespace

void chunk_rows(const ChunkRows& params, cudaStream_t stream) {
  const KvShape& shape = params.shape;
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  if (params.rows <= 0) return;
  const int64_t warps = params.rows * ((shape.num_q_heads + 1) / 2 + shape.num_kv_heads);
  CLO_CHECK(warps < INT32_MAX, warps);
  const dim3 grid(static_cast<unsigned>((warps + kWarps - 1) / kWarps));
  with_element(shape.type, [&]<typename Element>(Element) {
    launch(shape.head_dim == 64 ? chunk_rows_kernel<Element, 2> : chunk_rows_kernel<Element, 4>,
           grid, dim3(32 * kWarps), 0, stream, params);
  });
}

void store_chunk(const StoreChunk& params, cudaStream_t stream) {
  CLO_CHECK(params.end_token >= params.first_token + params.rows, params.end_token,
            params.first_token, params.rows);
  if (params.rows <= 0) return;
  const auto blocks = static_cast<unsigned>((params.rows + kStoreTokens - 1) / kStoreTokens);
  if (params.shape.compressed()) {
    const dim3 grid(blocks, static_cast<unsigned>(params.shape.num_kv_heads));
    with_element(params.shape.type, [&]<typename Element>(Element) {
      launch(params.shape.head_dim == 64 ? store_compressed_chunk_kernel<Element, 64>
                                         : store_compressed_chunk_kernel<Element, 128>,
             grid, dim3(kStoreThreads), 0, stream, params);
    });
    return;
  }
  launch(store_chunk_kernel, dim3(blocks, static_cast<unsigned>(params.shape.num_kv_heads)),
         dim3(kStoreThreads), 0, stream, params,
         static_cast<int32_t>(params.shape.row_bytes() / 16));
}

}  // namespace clo::kernels
