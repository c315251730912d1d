#pragma once
// Refresh: a head's set is chosen again and its missing rows are brought, by the GPU alone. One
// cluster of blocks serves one head from end to end: select (distances over the codes,
// histogram threshold, compaction in token order), difference (bitmap against the held bits, free
// slots in slot order), fetch (pinned host row -> slot), commit. Results equal the CPU backend's:
// reuse/reuse_rule, select/set_rule, kv/head_cache.
//
// `refresh_queue` runs beside the layers of a step and drains the jobs that decisions have queued:
// first those that the layer at hand waits for (the true query missed), then those for a layer or a
// step to come. Decisions: decide.cuh.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decode_tables.h"

namespace clo::kernels {

inline constexpr int kClusterBlocks = 4;

// Scratch of one cluster in device memory; contents have no meaning between jobs.
struct RefreshScratch {
  std::byte* data = nullptr;  // [num_clusters][bytes_per_cluster]
  int64_t bytes_per_cluster = 0;
};
// Three words per token: a key, a place in the list of tokens to bring, one in that of free slots.
inline constexpr int64_t kRefreshScratchTokenBytes = 12;
// Bytes of one cluster's scratch, for contexts of up to `max_capacity_tokens`. Pure.
int64_t refresh_scratch_bytes(int64_t max_capacity_tokens);

// Serves jobs, step after step, until queue->leave is set and the job in hand is finished; with
// `drain`, until the rings are empty. One launch at a time; jobs left over wait for the next one.
// It outlives the steps that it serves: bound to one, its clusters would wait at each step's end
// for the longest job in hand. Requires: queue_capacity a power of two, no less than the number of
// heads.
struct RefreshQueueParams {
  DecodeTables tables;
  RefreshScratch scratch;
  int32_t num_clusters = 4;
  // Warps of a block that fetch for a job made ahead, each with 4 KiB under way. Reads of host
  // memory take microseconds; more of them than the link needs fill the queues that the layers' own
  // reads pass through. An urgent job fetches with every warp, for the layers wait for it; with
  // many jobs waiting twice as many fetch.
  int32_t fetch_warps = 2;
  // Pause after every two pages that a block scores for a job that is in no hurry: not urgent, and
  // few waiting. The layers' kernels end with their slowest multiprocessor, so a choice that takes
  // longer but takes less of one costs them less.
  uint32_t score_nap_ns = 0;
  bool drain = false;
};
void refresh_queue(const RefreshQueueParams& params, cudaStream_t stream);

// First sets at the end of a prefill, from the last prompt query: every head of one layer and one
// slot selects without being asked, and rows come from the layer buffer, device to device. Without
// a layer buffer they come from where they are stored, and heads that have a set keep it.
// context_tokens: tokens in the cache by then. Nothing is counted.
struct PrimeSets {
  DecodeTables tables;
  RefreshScratch scratch;                 // [num_kv_heads]
  const float* queries = nullptr;         // [num_q_heads * head_dim]
  const std::byte* layer_rows = nullptr;  // [num_kv_heads][layer_capacity] rows, or null
  int64_t layer_capacity = 0;
  int64_t context_tokens = 0;
  int32_t slot = 0;
  int32_t layer = 0;
};
void prime_sets(const PrimeSets& params, cudaStream_t stream);

// Decides with the queries that the previous layer foresees (PredictRule::kPreviousLayer; other
// rows take no part) and queues the misses. `queries` [rows, num_q_heads * head_dim]. All other
// decisions are made where the true queries are (rows/decode_rows.cu).
struct DecideAhead {
  DecodeTables tables;
  const float* queries = nullptr;
  int32_t layer = 0;
  int32_t rows = 0;
};
void decide_ahead(const DecideAhead& params, cudaStream_t stream);

}  // namespace clo::kernels
