#pragma once
// The weight-streaming product of decode: out = x weight^T for up to kSkinnyRows rows, weights and
// activations in bf16 or f16, f32 sums. Each weight byte is read once; the rows share it. Sums are
// cut into `splits` parts of the input features, each written apart, so that a result never depends
// on the order in which blocks finish: the next kernel adds the parts in order.
//
// A row's result does not depend on how many rows there are (batch-invariant).
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kernels/decode_tables.h"

namespace clo::kernels {

struct SkinnyLinear {
  const void* weight = nullptr;  // [num_outputs, num_inputs], 16-byte aligned
  const void* x = nullptr;       // [rows, num_inputs], 16-byte aligned
  float* out = nullptr;          // [splits][rows][num_outputs]
  int64_t num_outputs = 0;       // any
  int64_t num_inputs = 0;        // a multiple of 8
  int32_t rows = 0;              // 1 to kSkinnyRows
  DType type = DType::kBF16;     // of weight and x: bf16 or f16
};

// A block's tile: 64 output features; a stage of its ring: 128 input features of them.
inline constexpr int kSkinnyTileOutputs = 64;
inline constexpr int kSkinnyStageInputs = 128;
// Above this a block of 256 threads with 48 KiB could not stay beside ours on a multiprocessor.
inline constexpr int64_t kSkinnyMaxSharedBytes = int64_t{150} << 10;
inline constexpr int kSkinnyMaxSplits = 8;

// How a product is cut. Pure, so that it is tested without a GPU.
struct SkinnyPlan {
  int32_t splits = 1;        // parts of the input features
  int64_t split_inputs = 0;  // input features of a part, a multiple of the stage's width
  int32_t tile_outputs = 0;  // output features of a tile
  int32_t grid = 0;          // resident blocks
  int32_t stages = 0;        // of the shared-memory ring
  int64_t shared_bytes = 0;
};
// Splits depend on the shape alone, never on `rows`; max_splits 1 where nobody adds parts up (the
// logits). shared_bytes_limit: what a block may have at most (opt-in); the plan stays below
// kSkinnyMaxSharedBytes by itself. A plan for more rows may serve fewer, with a ring that is a
// stage shorter than it could be. Fails by CLO_CHECK on sizes out of range.
SkinnyPlan plan_skinny_linear(int64_t num_outputs, int64_t num_inputs, int32_t rows,
                              int32_t num_multiprocessors, int64_t shared_bytes_limit,
                              int32_t max_splits = kSkinnyMaxSplits);
// Tiles x splits: the pieces of work that are dealt to blocks.
int64_t skinny_items(const SkinnyPlan& plan, int64_t num_outputs);
// Weight bytes that a multiprocessor reads, mean over most: 1 when all end together.
double skinny_balance(const SkinnyPlan& plan, int64_t num_outputs, int64_t num_inputs,
                      int32_t num_multiprocessors);
std::string describe(const SkinnyPlan& plan);

// Ordered on: `stream`. Launched with programmatic stream serialization: weights are prefetched
// before the kernel waits for the one that makes x.
void skinny_linear(const SkinnyLinear& params, const SkinnyPlan& plan, cudaStream_t stream);

}  // namespace clo::kernels
