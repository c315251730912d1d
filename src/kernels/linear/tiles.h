#pragma once
// Products with weights in tiles of codes (tensor/weight_tiles.h): int8 or 4 bits and f16 scales,
// widened on the way to the tensor cores. Bytes are what decode waits for, so a step with few rows
// takes about half, or a third, of the time that 16-bit weights take.
//
// x in bf16 or f16, f32 sums. Codes are exact in either type; a block's sum is scaled in f32.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/linear/linear.h"
#include "tensor/weight_tiles.h"

namespace clo::kernels {

// Inputs of one stage of the ring: eight tiles across.
constexpr int64_t tiled_stage_inputs(WeightBlocks blocks) { return 8 * tile_inputs(blocks); }

// Stages of the ring for up to 8 row_tiles rows: as deep as leaves room for a neighbour, or small
// enough for multiprocessors with 100 KB.
constexpr int tiled_stages(WeightBlocks blocks, int row_tiles, bool deep) {
  if (blocks == WeightBlocks::kInt8) return row_tiles == 1 ? (deep ? 6 : 4) : (deep ? 5 : 3);
  return row_tiles == 1 ? (deep ? 5 : 3) : (deep ? 4 : 2);
}

// As plan_skinny_linear, for a matrix in tiles; tile_outputs is kSkinnyTileOutputs too. Pure.
SkinnyPlan plan_tiled_linear(WeightBlocks blocks, int64_t num_outputs, int64_t num_inputs,
                             int32_t rows, int32_t num_multiprocessors, int64_t shared_bytes_limit,
                             int32_t max_splits = kSkinnyMaxSplits);

struct TiledLinear {
  WeightBlocks blocks = WeightBlocks::kInt8;
  const void* weight = nullptr;  // tiles of [num_outputs, num_inputs], 16-byte aligned
  const void* x = nullptr;       // [total_rows, num_inputs] of `type`, 16-byte aligned
  float* out = nullptr;          // [splits][total_rows][num_outputs]
  int64_t num_outputs = 0;       // any
  int64_t num_inputs = 0;        // a multiple of 32
  int32_t first_row = 0;         // rows [first_row, first_row + rows) are computed
  int32_t rows = 0;              // 1 to kSkinnyRows
  int32_t total_rows = 0;
  DType type = DType::kBF16;
};
// A row's result does not depend on how many rows there are. Launched as skinny_linear is. Ordered
// on: `stream`.
void tiled_linear(const TiledLinear& params, const SkinnyPlan& plan, cudaStream_t stream);

// The matrix as plain numbers, out [num_outputs, num_inputs] of `type`, for products of many rows.
struct ExpandTiles {
  WeightBlocks blocks = WeightBlocks::kInt8;
  const void* weight = nullptr;
  void* out = nullptr;  // 16-byte aligned
  int64_t num_outputs = 0;
  int64_t num_inputs = 0;
  DType type = DType::kBF16;
};
void expand_tiles(const ExpandTiles& params, cudaStream_t stream);

}  // namespace clo::kernels
