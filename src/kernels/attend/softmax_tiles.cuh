#pragma once
// One warp's share of a segment: its tiles of token rows pass through shared memory and are folded
// into a running softmax. No other warp takes part, so nothing waits for the whole block. A warp
// has room for one tile: the next tile's keys are on their way as soon as this one's have been
// used, and its values likewise. What that leaves of the latency, of memory and of the products'
// own chain, the other warps of the multiprocessor fill.
//
// The token side lies on the 16 rows of a tensor-core product and the group on its 8 columns
// (scores = K q^T, out^T = V^T p): a group of eight wastes nothing. K and V are exact in bf16
// or f16; the f32 queries and weights are split in two such numbers each, so that the products are
// as good as f32 (relative error 2^-16, in f16 2^-21). The kernel waits for memory; the doubled
// products are free.
#include <cstdint>

#include "kernels/attend/head_rows.cuh"
#include "kernels/linear/decode_codes.cuh"
#include "kernels/tensor_core.cuh"

namespace clo::kernels {

inline constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

template <int kHeadDim>
struct TileShape {
  static constexpr int kRowBytes = 4 * kHeadDim;     // K and V, 16 bits each
  static constexpr int kRowStride = kRowBytes + 16;  // rows start 4 banks apart
  static constexpr int kWarpBytes = kTileRows * kRowStride;
  static constexpr int kHalfBytes = kRowBytes / 2;  // K or V
  static constexpr int kSteps = kHeadDim / 16;      // products along the head
};

// Bytes of a stored row.
template <int kHeadDim, RowFormat kStored>
inline constexpr int kStoredBytes = kStored == RowFormat::kFull
                                        ? 4 * kHeadDim
                                        : (2 * kHeadDim + (kStored == RowFormat::kInt8 ? 8 : 0) +
                                           15) /
                                              16 * 16;

// Softmax weights are kept times 2^kWeightShift: see F16. A weight may also carry the scale of its
// row's V, which is up to 65504 / 127 in f16; with 2^6 the product is still a number.
template <typename Element, RowFormat kStored>
inline constexpr float kWeightShift =
    kStored == RowFormat::kInt8&& Element::kWeightShift > 6 ? 6.0f : Element::kWeightShift;

// Lane l holds columns (query heads) 2 (l % 4) + {0, 1}; of acc also elements 16 i + l / 4 + {0,
// 8}: acc[i] = {[e][c], [e][c + 1], [e + 8][c], [e + 8][c + 1]}. max is the same in all lanes of a
// column, sum is the lane's own rows'. Scores are in units of
// log 2; sum and acc are in units of 2^-kWeightShift below.
template <int kHeadDim>
struct RunningSoftmax {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
  float acc[TileShape<kHeadDim>::kSteps][4] = {};
};

// The group's queries as the second factor of the score products, shared by the block's warps: rows
// of elements, the high parts of eight queries, then the low parts. (In registers they would
// take 32.)
template <int kHeadDim, typename Element>
struct SplitQueries {
  static constexpr int kStride = kHeadDim * 2 + 16;
  static constexpr int kBytes = 2 * kMaxGroup * kStride;

  // queries [group][kHeadDim]; those past the group are zero. By all threads of the block; the
  // caller synchronises.
  static __device__ __forceinline__ void store(std::byte* memory, const float* queries, int group) {
    for (int i = static_cast<int>(threadIdx.x); i < kMaxGroup * kHeadDim / 2;
         i += static_cast<int>(blockDim.x)) {
      const int g = 2 * i / kHeadDim, d = 2 * i % kHeadDim;
      float2 q = {0, 0};
      if (g < group) q = *reinterpret_cast<const float2*>(queries + g * kHeadDim + d);
      const SplitPair parts = split<Element>(q.x, q.y);
      std::byte* at = memory + g * kStride + 2 * d;
      *reinterpret_cast<uint32_t*>(at) = parts.high;
      *reinterpret_cast<uint32_t*>(at + kMaxGroup * kStride) = parts.low;
    }
  }
  // Address that a lane gives to load the factors of product 0: high elements 0 to 7, 8 to 15, low
  // ones likewise. Product i is 32 i bytes on.
  static __device__ __forceinline__ uint32_t lane_address(uint32_t memory, int lane) {
    return memory +
           static_cast<uint32_t>((lane / 16 * kMaxGroup + lane % 8) * kStride + lane / 8 % 2 * 16);
  }
};

// Where the rows of a tile lie, one a lane (below kTileRows; null: masked), which count, and which
// of them are compressed.
struct TileRows {
  const std::byte* row = nullptr;
  uint32_t mask = 0;
  uint32_t compressed = 0;
};
template <int kHeadDim, RowFormat kStored>
__device__ __forceinline__ TileRows locate_tile(const HeadRows& h, int32_t tile, int32_t mapped,
                                                int lane) {
  TileRows rows;
  const int32_t at = tile * kTileRows + lane;
  if (lane < kTileRows) {
    rows.row =
        row_of(h, at, mapped, TileShape<kHeadDim>::kRowBytes, kStoredBytes<kHeadDim, kStored>);
  }
  rows.mask = __ballot_sync(kWholeWarp, rows.row != nullptr);
  if constexpr (kStored != RowFormat::kFull) {
    rows.compressed = __ballot_sync(kWholeWarp, rows.row != nullptr && is_stored(h, at));
  }
  return rows;
}

// Starts the copy of a tile's keys (half 0) or values (half 1), as one group. Masked rows become
// zeros: whatever is in their slots, a weight of zero times it stays zero. Eight lanes copy a whole
// line of 128 bytes. Codes of a compressed row go to the beginning of its half, its scales, with
// the keys, to the padding behind the row.
template <int kHeadDim, RowFormat kStored, int kHalf>
__device__ __forceinline__ void fetch_half(const HeadRows& h, const TileRows& rows, uint32_t stage,
                                           int lane) {
  using Shape = TileShape<kHeadDim>;
#pragma unroll
  for (int i = 0; i < kTileRows / 4; ++i) {
    const int r = 4 * i + lane / 8;
    const auto source = reinterpret_cast<const std::byte*>(
        __shfl_sync(kWholeWarp, reinterpret_cast<unsigned long long>(rows.row), r));
    const bool valid = source != nullptr;
    if constexpr (kStored != RowFormat::kFull) {
      if ((rows.compressed >> r & 1u) != 0) {
        const int offset = lane % 8 * 16;
        const uint32_t row = stage + static_cast<uint32_t>(r * Shape::kRowStride);
        if (offset < kHeadDim) {
          copy_async_16(row + static_cast<uint32_t>(kHalf * Shape::kHalfBytes + offset),
                        source + kHalf * kHeadDim + offset, true);
        }
        if (kStored == RowFormat::kInt8 && kHalf == 0 && lane % 8 == 7) {
          copy_async_16(row + Shape::kRowBytes, source + 2 * kHeadDim, true);
        }
        continue;
      }
    }
    const std::byte* from = (valid ? source : h.fixed) + kHalf * Shape::kHalfBytes + lane % 8 * 16;
    const uint32_t to = stage + static_cast<uint32_t>(r * Shape::kRowStride +
                                                      kHalf * Shape::kHalfBytes + lane % 8 * 16);
#pragma unroll
    for (int c = 0; c < Shape::kHalfBytes; c += 128) {
      copy_async_16(to + static_cast<uint32_t>(c), from + c, valid);
    }
  }
  copy_async_commit();
}

// Codes of the compressed rows of a half become elements, in place. Two lanes a row: all codes are
// read before the first element is written. Integers are exact in either type; what they are worth
// is the scales' affair.
template <int kHeadDim, typename Element, RowFormat kStored, int kHalf>
__device__ __forceinline__ void widen_half(uint32_t compressed, uint32_t stage, int lane) {
  if (compressed == 0) return;  // the same in the whole warp
  using Shape = TileShape<kHeadDim>;
  constexpr int kPieces = kHeadDim / 32;  // 16 codes each, of one lane
  const int row = lane % kTileRows, part = lane / kTileRows;
  const bool mine = (compressed >> row & 1u) != 0;
  const uint32_t half =
      stage + static_cast<uint32_t>(row * Shape::kRowStride + kHalf * Shape::kHalfBytes);
  uint4 codes[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (mine) codes[i] = load_shared(half + static_cast<uint32_t>((part * kPieces + i) * 16));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    if (!mine) continue;
    const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
    uint32_t pairs[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kStored == RowFormat::kInt8) {
        widen_bytes<Element>(words[w], pairs[2 * w], pairs[2 * w + 1]);
      } else {
        widen_fp8<Element>(words[w], pairs[2 * w], pairs[2 * w + 1]);
      }
    }
    const uint32_t to = half + static_cast<uint32_t>((part * kPieces + i) * 32);
    store_shared(to, uint4{pairs[0], pairs[1], pairs[2], pairs[3]});
    store_shared(to + 16, uint4{pairs[4], pairs[5], pairs[6], pairs[7]});
  }
  __syncwarp();
}

// What a lane's two rows of a tile (lane / 4 and 8 more) are multiplied with: scores by key,
// weights by value.
struct RowScales {
  float key[2] = {1, 1}, value[2] = {1, 1};
};
template <int kHeadDim, RowFormat kStored>
__device__ __forceinline__ RowScales load_scales(uint32_t compressed, uint32_t stage, int lane) {
  RowScales scales;
  if constexpr (kStored == RowFormat::kInt8) {
    using Shape = TileShape<kHeadDim>;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i;
      if ((compressed >> row & 1u) == 0) continue;
      const uint2 pair =
          load_shared_8(stage + static_cast<uint32_t>(row * Shape::kRowStride + Shape::kRowBytes));
      scales.key[i] = __uint_as_float(pair.x);
      scales.value[i] = __uint_as_float(pair.y);
    }
  }
  return scales;
}

// Scores of the tile's rows in `stage`. queries: SplitQueries' lane address.
template <int kHeadDim, typename Element>
__device__ __forceinline__ void score_tile(float (&score)[4], uint32_t queries, uint32_t mask,
                                           float scale_log2, const RowScales& scales,
                                           uint32_t stage, int lane) {
  using Shape = TileShape<kHeadDim>;
  float rest[4] = {};
  // Matrices of a product's first factor: tokens 0 to 7, 8 to 15, then both for the next 8
  // elements.
  const uint32_t keys =
      stage + static_cast<uint32_t>(lane % 16 * Shape::kRowStride + lane / 16 * 16);
#pragma unroll
  for (int i = 0; i < Shape::kSteps; ++i) {
    uint32_t a[4], b[4];
    load_matrices(a, keys + static_cast<uint32_t>(32 * i));
    load_matrices(b, queries + static_cast<uint32_t>(32 * i));
    multiply_add<Element>(score, a, b[0], b[1]);
    multiply_add<Element>(rest, a, b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool counts = ((mask >> (lane / 4 + i / 2 * 8)) & 1u) != 0;
    score[i] = counts ? (score[i] + rest[i]) * (scale_log2 * scales.key[i / 2]) : -INFINITY;
  }
}

// Folds the scores into the running maximum and sum, leaves weights in their place.
template <int kHeadDim, typename Element, RowFormat kStored>
__device__ __forceinline__ void weigh_tile(RunningSoftmax<kHeadDim>& softmax, float (&score)[4]) {
  using Shape = TileShape<kHeadDim>;
  float lost[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    // fmaxf leaves a NaN out; it comes back through the weights.
    float best = fmaxf(score[c], score[c + 2]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      best = fmaxf(best, __shfl_xor_sync(kWholeWarp, best, offset));
    }
    best = fmaxf(best, softmax.max[c]);
    // Nothing but masked rows so far: any finite base gives weights of zero.
    const float base = best == -INFINITY ? 0.0f : best;
    lost[c] = exp2f(softmax.max[c] - base);
    const float shifted = base - kWeightShift<Element, kStored>;
    score[c] = exp2f(score[c] - shifted);
    score[c + 2] = exp2f(score[c + 2] - shifted);
    softmax.max[c] = best;
    softmax.sum[c] = softmax.sum[c] * lost[c] + (score[c] + score[c + 2]);
  }
  if (__any_sync(kWholeWarp, lost[0] != 1.0f || lost[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < Shape::kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) softmax.acc[i][j] *= lost[j % 2];
    }
  }
}

// Adds the weighted values of the tile in `stage`.
template <int kHeadDim, typename Element>
__device__ __forceinline__ void add_values(RunningSoftmax<kHeadDim>& softmax,
                                           const float (&score)[4], const RowScales& scales,
                                           uint32_t stage, int lane) {
  using Shape = TileShape<kHeadDim>;
  // Tokens 0 to 7, and 8 to 15.
  const SplitPair first = split<Element>(score[0] * scales.value[0], score[1] * scales.value[0]);
  const SplitPair second = split<Element>(score[2] * scales.value[1], score[3] * scales.value[1]);
  const uint32_t high[2] = {transpose_matrix(first.high), transpose_matrix(second.high)};
  const uint32_t low[2] = {transpose_matrix(first.low), transpose_matrix(second.low)};
  // V^T: matrices of elements 0 to 7, 8 to 15 of tokens 0 to 7, then of tokens 8 to 15.
  const uint32_t values =
      stage + static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * Shape::kRowStride + 2 * kHeadDim +
                                    lane / 8 % 2 * 16);
#pragma unroll
  for (int i = 0; i < Shape::kSteps; ++i) {
    uint32_t a[4];
    load_matrices_transposed(a, values + static_cast<uint32_t>(32 * i));
    multiply_add<Element>(softmax.acc[i], a, high[0], high[1]);
    multiply_add<Element>(softmax.acc[i], a, low[0], low[1]);
  }
}

// Rows that counted; of them full ones, where others are compressed.
struct RowCounts {
  int32_t all = 0, full = 0;
};

// A tile whose copies have been started, keys and values in a group each.
struct FirstTile {
  TileRows rows;
  bool started = false;
};
template <int kHeadDim, RowFormat kStored>
__device__ __forceinline__ FirstTile start_tile(const HeadRows& h, int32_t tile, uint32_t memory,
                                                int lane) {
  const int32_t mapped = mapped_token(h, tile * kTileRows + lane % kTileRows);
  const FirstTile first = {locate_tile<kHeadDim, kStored>(h, tile, mapped, lane), true};
  fetch_half<kHeadDim, kStored, 0>(h, first.rows, memory, lane);
  fetch_half<kHeadDim, kStored, 1>(h, first.rows, memory, lane);
  return first;
}

// Tiles first, first + stride, ... below last of one head. `started`: the first of them, if its
// copies are under way; copies of another are awaited and thrown away. `memory`: the warp's
// kWarpBytes of shared memory. Returns how many rows counted.
template <int kHeadDim, typename Element, RowFormat kStored>
__device__ __forceinline__ RowCounts attend_tiles(const HeadRows& h, const float* queries,
                                                  int group, float scale_log2, int32_t first,
                                                  int32_t last, int32_t stride, FirstTile started,
                                                  uint32_t memory, std::byte* query_memory,
                                                  int lane, RunningSoftmax<kHeadDim>& softmax) {
  const auto map_entry = [&](int32_t tile) {
    return mapped_token(h, tile * kTileRows + lane % kTileRows);
  };
  // A map entry is asked for two tiles before its row: the row's address waits for it.
  if (first < last && !started.started) {
    copy_async_wait<0>();
    __syncwarp();
    started = start_tile<kHeadDim, kStored>(h, first, memory, lane);
  }
  TileRows tile_rows = started.rows;
  int32_t mapped = map_entry(first + stride), mapped_after = map_entry(first + 2 * stride);
  SplitQueries<kHeadDim, Element>::store(query_memory, queries, group);
  __syncthreads();
  const uint32_t query_address =
      SplitQueries<kHeadDim, Element>::lane_address(shared_address(query_memory), lane);

  RowCounts rows;
  for (int32_t tile = first; tile < last; tile += stride) {
    const bool more = tile + stride < last;
    float score[4] = {};
    copy_async_wait<1>();
    __syncwarp();  // every lane's copies of the keys are seen by all
    rows.all += __popc(tile_rows.mask);
    if constexpr (kStored != RowFormat::kFull) {
      rows.full += __popc(tile_rows.mask & ~tile_rows.compressed);
    }
    const uint32_t compressed = tile_rows.compressed;
    // Before the next tile's scales take their place.
    const RowScales scales = load_scales<kHeadDim, kStored>(compressed, memory, lane);
    if constexpr (kStored != RowFormat::kFull) {
      widen_half<kHeadDim, Element, kStored, 0>(compressed, memory, lane);
    }
    score_tile<kHeadDim, Element>(score, query_address, tile_rows.mask, scale_log2, scales, memory,
                                  lane);
    if (more) {
      tile_rows = locate_tile<kHeadDim, kStored>(h, tile + stride, mapped, lane);
      mapped = mapped_after;
      mapped_after = map_entry(tile + 3 * stride);
      __syncwarp();  // all lanes have read the keys before others take their place
      fetch_half<kHeadDim, kStored, 0>(h, tile_rows, memory, lane);
    } else {
      copy_async_commit();  // keeps the count of groups
    }
    weigh_tile<kHeadDim, Element, kStored>(softmax, score);
    copy_async_wait<1>();
    __syncwarp();
    if constexpr (kStored != RowFormat::kFull) {
      widen_half<kHeadDim, Element, kStored, 1>(compressed, memory, lane);
    }
    add_values<kHeadDim, Element>(softmax, score, scales, memory, lane);
    __syncwarp();
    if (more) {
      fetch_half<kHeadDim, kStored, 1>(h, tile_rows, memory, lane);
    } else {
      copy_async_commit();
    }
  }
  copy_async_wait<0>();
  return rows;
}

}  // namespace clo::kernels
