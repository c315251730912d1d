#pragma once
// How hard heads are to reuse in a request, by the last queries of its prompt: which heads fill the
// memory that is left is settled by it (SequenceKv::settle_residents).
#include <cuda_runtime_api.h>

#include "kernels/decode_tables.h"

namespace clo::kernels {

// misses[head] of one layer and slot: of the last `count` queries of a chunk how many, each against
// the one before it, are no hit by the cosine. CPU twin: Attention::note_difficulty.
// Requires: 1 <= count < rows.
struct PromptDifficulty {
  DecodeTables tables;
  const void* queries = nullptr;  // [rows, num_q_heads * head_dim] of the shape's type, rotated
  uint32_t* misses = nullptr;     // [num_kv_heads]
  int64_t rows = 0;
  int32_t count = 0;
  int32_t slot = 0;
  int32_t layer = 0;
};
void prompt_difficulty(const PromptDifficulty& params, cudaStream_t stream);

}  // namespace clo::kernels
