#pragma once
// Causal attention of a prefill chunk over one layer's rows, our own kernel: it takes every shape
// that the engine takes, needs no workspace and no library, and is the yardstick for sdpa.h. Query
// i stands at token first_token + i and attends tokens [0, first_token + i].
//
// The rows past first_token + num_tokens are never read, so the layer buffer may hold anything
// there. It does not move rows, apply rotation or write log-sum-exps.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "ops/kv_layout.h"

namespace clo::kernels {

// Also what Sdpa takes.
struct PrefillAttention {
  KvShape shape;  // rows in bf16 or f16; head_dim 64 or 128, group size 1 to kMaxGroup
  // Of the rows' type, [num_tokens, num_q_heads * head_dim], rotated, 16-byte aligned.
  const void* queries = nullptr;
  const std::byte* layer_rows = nullptr;  // [num_kv_heads][layer_capacity] rows (K | V)
  int64_t layer_capacity = 0;             // >= first_token + num_tokens
  void* out = nullptr;                    // likewise; not the queries themselves
  int64_t first_token = 0;
  int64_t num_tokens = 0;  // >= 1
  float scale = 0;         // of query-key products, > 0
};

// Floating-point operations of the two products over the pairs that causality leaves.
double prefill_attention_flops(const PrefillAttention& params);

// Each (query, head) is summed by one warp in token order, so a query's result depends neither on
// timing nor on how the prompt was cut into chunks, to the bit.
// Requires: the above, checked; first_token + num_tokens and num_tokens * group_size < 2^31.
// Ordered on: `stream`. Capturable.
void prefill_attention(const PrefillAttention& params, cudaStream_t stream);

}  // namespace clo::kernels
