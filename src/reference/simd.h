#pragma once
// The hot loops of the CPU backend behind a table of functions, compiled once per instruction set
// and chosen at start by what the processor has. Every loop gives the same result for a row
// whatever else is in its batch. No loop allocates; buffers belong to the caller.
#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"
#include "tensor/weight_blocks.h"

namespace clo {

// Rows of queries and of keys that the prefill tiles work on at once.
inline constexpr int kTileQueries = 48;
inline constexpr int kStripKeys = 16;
// Largest group size and head size that fixed buffers are cut for; checked when a model loads.
inline constexpr int kMaxGroup = 64;
inline constexpr int kMaxHeadDim = 512;
// Rows in one online-softmax block of decode attention.
inline constexpr int kBlockRows = 64;
// Rows that are asked for ahead of the one being read.
inline constexpr int kRowsAhead = 16;

// What a token row holds: K and V of an element type, or a compressed row (ops/stored_row.h).
enum class RowKind : uint8_t { kF32, kF16, kBF16, kInt8, kFp8 };

// 32 activations in 8 bits: x = scale code.
struct ActivationBlock {
  int8_t code[kBlockInputs];
  float scale;
  float sum;  // of scale code: what a weight's minimum is multiplied with
};

// out[b * out_stride + n] = dot(weight[n], x[b]) (+ bias[n]) (+ out when accumulate).
struct BlockProduct {
  WeightBlocks blocks = WeightBlocks::kNone;
  const std::byte* weight = nullptr;  // [rows, cols] in groups of eight rows
  int64_t rows = 0, cols = 0;
  const ActivationBlock* x = nullptr;  // [batch, cols / 32]
  int64_t batch = 0;
  const float* bias = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
  bool accumulate = false;
};

struct SimdTable {
  const char* name;

  // out[b * out_stride + n] = dot(weight[n], x[b]) (+ bias[n]) (+ out when accumulate), for
  // n in [first, last). weight [n, cols], x [batch, cols].
  void (*linear)(DType type, const std::byte* weight, int64_t cols, int64_t first, int64_t last,
                 const float* x, int64_t batch, const float* bias, float* out, int64_t out_stride,
                 bool accumulate);

  // The same for weights in blocks, groups [first, last) of eight rows.
  void (*linear_blocks)(const BlockProduct& product, int64_t first, int64_t last);
  void (*quantize_activations)(const float* x, int64_t cols, ActivationBlock* out);

  void (*to_f32)(DType type, const std::byte* source, float* target, int64_t count);
  void (*from_f32)(DType type, const float* source, std::byte* target, int64_t count);
  // The values of a row: key, value [head_dim].
  void (*widen_row)(RowKind kind, const std::byte* row, int head_dim, float* key, float* value);

  // Online softmax of `group` queries over `count` <= kBlockRows token rows. rows[count, listed)
  // are read next: their lines are asked for early.
  // queries [group, head_dim] already scaled; max, sum [group]; acc [group, head_dim].
  void (*attend_rows)(RowKind kind, int head_dim, int group, const std::byte* const* rows,
                      int count, int listed, const float* queries, float* max, float* sum,
                      float* acc);
  // The same, keys only: log-sum-exp without values.
  void (*score_rows)(RowKind kind, int head_dim, int group, const std::byte* const* rows, int count,
                     const float* queries, float* scores);  // scores [group, kBlockRows]

  // Prefill: scores[r * keys + c] = dot(query r, key c), queries at `stride`, keys packed in
  // strips of kStripKeys: [strip][head_dim][kStripKeys]. keys is a multiple of kStripKeys.
  void (*score_tile)(const float* queries, int64_t stride, int rows, const float* packed_keys,
                     int head_dim, int keys, float scale, float* scores);
  // Row r attends keys [0, limit[r]): updates max[r], sum[r], turns scores into weights, scales
  // out[r] by what the old maximum lost.
  void (*softmax_tile)(float* scores, int rows, int keys, const int* limit, float* max, float* sum,
                       float* rescale);
  // out[r] = out[r] * rescale[r] + sum_c weights[r, c] values[c]; values [keys, head_dim].
  void (*value_tile)(const float* weights, int rows, int keys, const float* rescale,
                     const float* values, int head_dim, float* out, int64_t out_stride);

  // distances[t] = sum over group of popcount(code[t] ^ query[g]); counts the histogram too.
  void (*hamming)(const uint64_t* codes, int words, int64_t count, const uint64_t* queries,
                  int group, uint16_t* distances, uint32_t* histogram);

  // distances[t] = sum over planes p of 2^p popcount((code[t] ^ signs) & planes[p]), of three
  // planes; counts the histogram too. signs [words], planes [3][words].
  void (*graded)(const uint64_t* codes, int words, int64_t count, const uint64_t* signs,
                 const uint64_t* planes, uint16_t* distances, uint32_t* histogram);

  void (*gated_silu)(const float* gate, const float* up, float* out, int64_t count);
  // In place: signs flipped where a bit of `signs` [width / 32] is set, then the fast
  // Walsh-Hadamard transform of `width` values (a power of two, >= 32).
  void (*hadamard)(float* x, const uint32_t* signs, int width);
};

const SimdTable& simd_baseline();
#if defined(__x86_64__)
const SimdTable& simd_avx2();
const SimdTable& simd_avx512_vnni();
#endif

// The best table for this processor; CLO_SIMD=baseline or avx2 in the environment forces a plainer
// one.
const SimdTable& simd_table();

}  // namespace clo
