#pragma once
// Key spread: how far the keys of each head of a sequence lie apart, which says what a query's way
// from its label means for scores (reuse_rule: score_drift). Once, at the end of a prompt.
#include <cuda_runtime_api.h>

#include "kernels/decode_tables.h"

namespace clo::kernels {

inline constexpr int kSpreadTokens = 256;

// rules[head].drift_scale = scale x spread, of every layer and head of a slot, over up to
// kSpreadTokens tokens evenly spread in the context: stored rows of the host store, or of a
// resident head. The same bits in every run. CPU twin: CpuOps::key_spread.
// Requires: the rows are written.
struct KeySpread {
  DecodeTables tables;
  HeadRule* rules = nullptr;  // as tables.rules
  int32_t slot = 0;
  int64_t context_tokens = 0;
};
void key_spread(const KeySpread& params, cudaStream_t stream);

}  // namespace clo::kernels
