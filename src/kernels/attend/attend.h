#pragma once
// Decode attention over [sink | set | ring] of every (row, KV head) of one layer, in one launch:
// evictable heads read their slots, resident heads their rows through the set's list or, when they
// attend everything, all of them. The tiles of all heads are dealt evenly to resident blocks; a
// block that crosses from one head to the next starts a new part; the last block to finish a head
// merges its parts in a fixed order (log-sum-exp), so the result does not depend on timing.
//
// A block waits until no refresh is pending of the heads that it reads; of others it needs nothing,
// because the tiles dealt depend on the context alone (head_rows.cuh). That asks for an invariant:
// num_slots_used never exceeds the set size at the present context (fault kSetTooLong). When a
// head's rows have been read its tail queues the job that decode_rows found due for the next step.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decode_tables.h"

namespace clo::kernels {

struct AttendRows {
  DecodeTables tables;
  const float* queries = nullptr;  // [rows, num_q_heads * head_dim]
  void* out = nullptr;             // [rows, num_q_heads * head_dim] of the rows' type
  float* log_sum_exp = nullptr;    // [rows, num_q_heads] or null
  float* parts = nullptr;          // [attend_parts(...)][group_size][head_dim + 2] scratch
  uint32_t* arrivals = nullptr;    // [rows * num_kv_heads], zero before the first launch; left zero
  int32_t layer = 0;
  int32_t rows = 0;
  int32_t grid = 0;  // resident blocks: attend_grid()
};
// Parts that a launch may write: one per (block, head) along the deal.
int64_t attend_parts(int32_t grid, int32_t rows, int32_t num_kv_heads);
int32_t attend_grid(const KvShape& shape, int32_t num_multiprocessors);
void attend(const AttendRows& params, cudaStream_t stream);

}  // namespace clo::kernels
