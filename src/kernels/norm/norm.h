#pragma once
// What lies between two products of a decode or prefill step: the parts of a product are added up
// and the result is normalised, gated or looked up. Residual stream in f32, products' inputs
// and the embedding table of `type`: bf16 or f16.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decode_tables.h"
#include "tensor/weight_tiles.h"

namespace clo::kernels {

// x += bias + sum of parts; out = round(rms_norm(x) * weight). Without parts x is only read.
struct AddNorm {
  float* x = nullptr;             // [rows, width] residual stream
  const float* parts = nullptr;   // [splits][rows][width] or null
  const float* bias = nullptr;    // [width] or null
  const float* weight = nullptr;  // [width]
  void* out = nullptr;            // [rows, width]
  int64_t rows = 0;
  int64_t width = 0;  // a multiple of 8
  int32_t splits = 0;
  float epsilon = 0;
  DType type = DType::kBF16;
};
void add_norm(const AddNorm& params, cudaStream_t stream);

// out = round(silu(gate) * up), gate and up being the halves of bias + sum of parts.
struct GatedSilu {
  const float* parts = nullptr;  // [splits][rows][2 * width]
  const float* bias = nullptr;   // [2 * width] or null
  void* out = nullptr;           // [rows, width]
  int64_t rows = 0;
  int64_t width = 0;  // a multiple of 8
  int32_t splits = 1;
  DType type = DType::kBF16;
};
void gated_silu(const GatedSilu& params, cudaStream_t stream);
// The same for a prefill chunk: x [rows, 2 * width].
struct GatedSiluRows {
  const void* x = nullptr;
  void* out = nullptr;  // [rows, width]
  int64_t rows = 0;
  int64_t width = 0;
  DType type = DType::kBF16;
};
void gated_silu_rows(const GatedSiluRows& params, cudaStream_t stream);

// Step begins: x[r] = table[token of row r]; the rotary table of row r's position; the step number.
// Rows without a sequence get zeros. The first kernel of a decode graph.
struct BeginStep {
  DecodeTables tables;
  const void* table = nullptr;                 // [vocab_size, width], or its tiles
  const float* inverse_frequencies = nullptr;  // [half_dim]
  float* x = nullptr;                          // [rows, width]
  float* cosine = nullptr;                     // [rows, half_dim]
  float* sine = nullptr;                       // [rows, half_dim]
  float attention_factor = 1;
  int64_t width = 0;
  int32_t rows = 0;
  int32_t half_dim = 0;
  DType type = DType::kBF16;
  WeightBlocks blocks = WeightBlocks::kNone;  // of the table: tensor/weight_tiles.h
};
void begin_step(const BeginStep& params, cudaStream_t stream);

// The same for a prefill chunk of one sequence: ids and first position are arguments.
struct BeginChunk {
  const int32_t* ids = nullptr;  // [rows], device
  const void* table = nullptr;
  const float* inverse_frequencies = nullptr;
  float* x = nullptr;
  float* cosine = nullptr;
  float* sine = nullptr;
  float attention_factor = 1;
  int64_t first_position = 0;
  int64_t width = 0;
  int64_t rows = 0;
  int32_t half_dim = 0;
  DType type = DType::kBF16;
  WeightBlocks blocks = WeightBlocks::kNone;  // of the table: tensor/weight_tiles.h
};
void begin_chunk(const BeginChunk& params, cudaStream_t stream);

}  // namespace clo::kernels
