#pragma once
// Where a run of consecutive tokens of one head lies in the layer buffer and in its host page. Pure
// 64-bit arithmetic, for host and device: a layer passes 2^31 elements early.
#include <cstdint>

#include "ops/kv_layout.h"

#if defined(__CUDACC__)
#define CLO_ROWS_INLINE __host__ __device__ __forceinline__
#else
#define CLO_ROWS_INLINE inline
#endif

namespace clo::kernels {

// The part of one page that belongs to one KV head and to tokens [first_token, end_token).
struct PageRun {
  int64_t page = 0;        // index in the sequence's page table
  int32_t first_slot = 0;  // token of the page
  int32_t num_tokens = 0;
  int32_t kv_head = 0;
  int64_t buffer_row = 0;  // row of the layer buffer
};

// Runs of a range: one for each page that it touches and each head.
CLO_ROWS_INLINE int32_t num_page_runs(int64_t first_token, int64_t end_token,
                                      int32_t num_kv_heads) {
  if (end_token <= first_token) return 0;
  return static_cast<int32_t>((end_token - 1) / kPageTokens - first_token / kPageTokens + 1) *
         num_kv_heads;
}
// Run `index`, heads fastest: neighbouring blocks write neighbouring addresses of a page.
CLO_ROWS_INLINE PageRun page_run(int32_t index, int64_t first_token, int64_t end_token,
                                 int32_t num_kv_heads, int64_t layer_capacity) {
  PageRun run;
  run.page = first_token / kPageTokens + index / num_kv_heads;
  run.kv_head = index % num_kv_heads;
  const int64_t page_first = run.page * kPageTokens;
  const int64_t first = first_token > page_first ? first_token : page_first;
  const int64_t page_end = page_first + kPageTokens;
  const int64_t end = end_token < page_end ? end_token : page_end;
  run.first_slot = static_cast<int32_t>(first - page_first);
  run.num_tokens = static_cast<int32_t>(end - first);
  run.buffer_row = run.kv_head * layer_capacity + first;
  return run;
}

// Number of a token's row, or code, in the host store: [layer][page][kv_head][token].
CLO_ROWS_INLINE int64_t host_row_index(int64_t num_pages, int32_t num_kv_heads, int32_t layer,
                                       int64_t page, int32_t kv_head, int32_t slot) {
  return ((layer * num_pages + page) * num_kv_heads + kv_head) * kPageTokens + slot;
}
// Number of a token's code in a code block: [layer][kv_head][token].
CLO_ROWS_INLINE int64_t block_code_index(int32_t num_kv_heads, int32_t layer, int32_t kv_head,
                                         int32_t slot) {
  return (int64_t{layer} * num_kv_heads + kv_head) * kPageTokens + slot;
}

}  // namespace clo::kernels
