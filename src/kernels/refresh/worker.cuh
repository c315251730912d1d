#pragma once
// What the phases of a refresh share: the head at hand, the block's shared memory, the cluster's
// scratch, sums over the block.
//
// The tokens of a context are cut into as many slices of whole pages as the cluster has blocks, and
// a block does everything for its slice: keys, bits, its part of the list of fresh tokens. So only
// histograms and counts cross from block to block, and token order is block order.
#include <cstddef>
#include <cstdint>

#include "kernels/decode_tables.h"
#include "kernels/key_scores.cuh"
#include "kernels/refresh/cluster.cuh"
#include "kernels/refresh/refresh.h"
#include "kernels/rules.cuh"
#include "ops/graded_query.h"

namespace clo::kernels {

inline constexpr int kRefreshThreads = 256;
inline constexpr int kRefreshWarps = kRefreshThreads / 32;
inline constexpr int kRingBytes = 32 * 1024;  // codes under way: latency x what a block consumes
// Distances of 8 queries x 256 bits, or of a graded query; 2^11 for keys.
inline constexpr int kMaxBins = 2049;
static_assert(kMostDistance < kMaxBins);
inline constexpr int kMaxCodeWords = 32;                  // 64-bit words of a group's query codes
inline constexpr int kPagesAtOnce = 256;                  // page pointers held in shared memory
inline constexpr int kMaxScoreWords = kMaxCodeBits / 32;  // 32-bit words of a code
inline constexpr int kMaxGroupFloats = kMaxGroup * 128;

// One head to refresh.
struct HeadWork {
  int32_t slot, layer, kv_head;
  int32_t context_tokens;
  const float* query;            // [group_size][head_dim], global
  const std::byte* device_rows;  // priming: the head's rows, token t at t; null: host pages
  int32_t fetch_warps;           // of each block that bring rows
  uint32_t score_nap_ns;         // see RefreshQueueParams
  bool counted;
};

// What a set becomes: slots (evictable head: only what is missing, or all of it), or a resident
// head's list.
enum class SetForm : uint8_t { kDifference, kWhole, kList };

// The head cache that changes; see kv/head_cache.h.
struct HeadMemory {
  std::byte* slots;
  const std::byte* resident;  // null: evictable
  int32_t* slot_token;
  uint32_t* held;  // 32 tokens a word; null for a resident head
  float* label;
  HeadState* state;
  int32_t held_tokens;     // tokens that `held` has bits for
  int32_t num_slots_used;  // before the change
  SetForm form;
};

// Which tokens are chosen from, and which of them are this block's.
struct Candidates {
  int32_t first, end;
  int32_t num_select;
  int32_t slice_tokens;            // tokens of a block's slice: whole pages
  int32_t slice_begin, slice_end;  // this block's

  __device__ __forceinline__ int32_t begin_here() const { return max(first, slice_begin); }
  __device__ __forceinline__ int32_t end_here() const { return min(end, slice_end); }
  // The candidates among tokens [token, token + 32), as bits.
  __device__ __forceinline__ uint32_t mask(int32_t token) const {
    const int32_t low = first - token, high = end - token;
    if (low >= 32 || high <= 0) return 0;
    const uint32_t from = low <= 0 ? 0xFFFFFFFFu : 0xFFFFFFFFu << low;
    return high >= 32 ? from : from & ((1u << high) - 1);
  }
};

// The cluster's scratch: three words per token. See refresh_scratch_bytes.
struct ClusterScratch {
  uint32_t* keys;       // by token, smallest win: words, or in the same place uint16 distances
  int32_t* fresh;       // tokens to bring; a block's begin at its slice's first token
  int32_t* free_slots;  // slots to fill; a block's begin at its share's first slot

  __device__ __forceinline__ uint16_t* distances() const {
    return reinterpret_cast<uint16_t*>(keys);
  }
};

struct RowMove {
  const std::byte* source;
  std::byte* target;
};

struct RefreshShared {
  union {
    uint4 ring[kRingBytes / 16];       // scoring: codes of tokens
    uint32_t bin_sums[kMaxBins];       // after it: the cluster's histogram
    float query[kMaxGroupFloats];      // before it, and for exact scores
    float projection[kMaxCodeBits];    // before it, of the group's queries
    RowMove moves[kRefreshWarps][32];  // fetching: rows that a warp copies next
  };
  uint32_t histogram[kMaxBins];                     // of this block; others read it
  alignas(8) uint64_t rows_arrived[kRefreshWarps];  // barriers of bulk copies
  alignas(16) uint64_t query_codes[kMaxCodeWords];  // [group_size][code words]
  uint32_t majority[kMaxScoreWords];                // the group's queries as one; see score.cuh
  uint32_t planes[kWeightPlanes][kMaxScoreWords];
  int32_t base_of_word[kMaxScoreWords];
  const uint64_t* page_codes[kPagesAtOnce];
  SoftmaxSum softmax[kRefreshWarps][kMaxGroup];  // others read it
  SoftmaxSum softmax_total[kMaxGroup];
  uint32_t warp_sums[kRefreshWarps];
  uint32_t threshold_bin;  // find_threshold's answer
  uint32_t wanted_of_bin;
  uint32_t num_fresh, num_free;              // of this block; others read them
  uint32_t fresh_begin[kClusterBlocks + 1];  // rank of each block's first fresh token
  uint32_t free_begin[kClusterBlocks + 1];
  ClusterScratch scratch;
  HeadWork work;  // the head at hand, the same in all blocks
  HeadMemory head;
  Candidates candidates;
  HeadWork message[2];  // from the leader to its cluster, two in turn; slot -1: none
};
// One per block, and found by name: the phases are functions of their own, each with the registers
// of a multiprocessor that it shares with other kernels, and pass what they know through here.
static __shared__ RefreshShared shared;
static_assert(sizeof(RefreshShared) <= 48 * 1024, "beside a weight-streaming block");

// Once per kernel. A __syncthreads lies between this and the first use.
__device__ __forceinline__ void bind_scratch(const RefreshScratch& scratch) {
  if (threadIdx.x != 0) return;
  const int64_t tokens =
      scratch.bytes_per_cluster / kRefreshScratchTokenBytes / kPageTokens * kPageTokens;
  std::byte* data = scratch.data + cluster_index() * scratch.bytes_per_cluster;
  shared.scratch.keys = reinterpret_cast<uint32_t*>(data);
  shared.scratch.fresh = reinterpret_cast<int32_t*>(data + 4 * tokens);
  shared.scratch.free_slots = reinterpret_cast<int32_t*>(data + 8 * tokens);
}

// Where the row of a token is read: the layer buffer (priming: full rows), or resident rows or the
// host page (stored rows).
__device__ __forceinline__ const std::byte* source_row(const DecodeTables& t, int64_t token) {
  const HeadWork& work = shared.work;
  if (work.device_rows != nullptr) return work.device_rows + token * row_bytes(t.shape);
  if (shared.head.resident != nullptr) {
    return shared.head.resident + token * stored_row_bytes(t.shape);
  }
  return host_row(t, t.slots[work.slot], work.layer, work.kv_head, token);
}

// Sum of `value` over the block's threads before this one; `total`: over all. All threads call it.
__device__ __forceinline__ uint32_t block_prefix(uint32_t value, uint32_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // the last call's sums have been read
  if (lane == 31) shared.warp_sums[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kRefreshWarps; ++w) {
    const uint32_t of_warp = shared.warp_sums[w];
    before += w < warp ? of_warp : 0;
    total += of_warp;
  }
  return before + sum - value;
}

}  // namespace clo::kernels
