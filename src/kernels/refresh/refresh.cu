#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/refresh/decide.cuh"
#include "kernels/refresh/refresh.h"
#include "kernels/refresh/refresh_head.cuh"

namespace clo::kernels {

namespace {

__device__ __forceinline__ bool is_leader() { return cluster_rank() == 0 && threadIdx.x == 0; }

// A word that other blocks change, as it is now.
__device__ __forceinline__ unsigned long long load_now(const unsigned long long* word) {
  return *static_cast<const volatile unsigned long long*>(word);
}

// ---- jobs from the queue ----------------------------------------------------------------------

// With more than so many jobs a cluster waiting, the link is what the step waits for, and not the
// layers that more reads under way would slow.
constexpr unsigned kBacklogTurns = 1;
constexpr int kBacklogFactor = 2;

// Takes the oldest job of a ring; slot -1: none is there.
__device__ __forceinline__ HeadWork take_job(const RefreshQueueParams& params, int ring) {
  const DecodeTables& t = params.tables;
  RefreshQueue::Ring& of_ring = t.queue->rings[ring];
  HeadWork work = {};
  work.slot = -1;
  for (;;) {
    const unsigned long long position = load_now(&of_ring.head);
    const RefreshJob& entry = t.jobs[ring * t.queue_capacity + (position & (t.queue_capacity - 1))];
    if (load_acquire(&entry.ticket) != static_cast<uint32_t>(position + 1)) return work;
    // Read before it is claimed: the entry may be filled anew as soon as the head has moved.
    const RefreshJob job = {__ldcg(&entry.slot), __ldcg(&entry.layer), __ldcg(&entry.kv_head),
                            __ldcg(&entry.query), __ldcg(&entry.context_tokens)};
    __threadfence();
    if (atomicCAS(&of_ring.head, position, position + 1) != position) continue;
    work.slot = job.slot;
    work.layer = job.layer;
    work.kv_head = job.kv_head;
    work.context_tokens = job.context_tokens;
    work.query = kept_query(t, table_index(t, job.slot, job.layer, job.kv_head), job.query);
    if (ring == kUrgent) {
      work.fetch_warps = kRefreshWarps;
    } else if (load_now(&of_ring.tail) - position > kBacklogTurns * num_clusters()) {
      work.fetch_warps = min(kBacklogFactor * params.fetch_warps, kRefreshWarps);
    } else {
      work.fetch_warps = params.fetch_warps;
      // A job for the layer to come is in a hurry.
      const PredictRule predict = t.slots[job.slot].rules.predict;
      if (predict == PredictRule::kPreviousStep) work.score_nap_ns = params.score_nap_ns;
    }
    work.counted = true;
    return work;
  }
}

__device__ __forceinline__ bool rings_empty(const RefreshQueue& queue) {
  for (const RefreshQueue::Ring& ring : queue.rings) {
    if (load_now(&ring.head) < load_now(&ring.tail)) return false;
  }
  return true;
}

// Takes the oldest urgent job, or the oldest of the others; slot -1: there will be none, leave.
// Without an end to its patience: how long the next step is in coming, only the host knows.
__device__ __noinline__ HeadWork next_job(const RefreshQueueParams& params) {
  const DecodeTables& t = params.tables;
  const RefreshQueue& queue = *t.queue;
  HeadWork none = {};
  none.slot = -1;
  for (;;) {
    if (load_acquire(&queue.fault) != 0) return none;
    if (!params.drain && load_acquire(&queue.leave) != 0) return none;
    for (int ring = 0; ring < kNumRings; ++ring) {
      const HeadWork job = take_job(params, ring);
      if (job.slot >= 0) return job;
    }
    if (params.drain && rings_empty(queue)) return none;
    __nanosleep(100);
  }
}

__global__ void __launch_bounds__(kRefreshThreads, 4)
    refresh_queue_kernel(const __grid_constant__ RefreshQueueParams params) {
  bind_scratch(params.scratch);
  wait_for_predecessor();
  const DecodeTables& t = params.tables;
  for (int turn = 0;; turn ^= 1) {
    if (is_leader()) shared.message[turn] = next_job(params);
    cluster_sync();
    // Two messages in turn: when the leader writes this one again, all have read it, because they
    // have come to the cluster_sync between.
    const int32_t slot_index = shared_of(&shared.message[turn], 0)->slot;
    if (slot_index < 0) break;
    if (threadIdx.x == 0) shared.work = *shared_of(&shared.message[turn], 0);
    // What made the job, and what other clusters did to this head, was acquired by the leader; each
    // thread must see it.
    __threadfence();
    __syncthreads();
    const BatchSlot& slot = t.slots[slot_index];
    const int32_t layer = shared.work.layer;
    const int64_t index = table_index(t, slot_index, layer, shared.work.kv_head);
    if (slot.active != 0 && !attends_all(slot.rules, t.heads[index].resident != nullptr, layer,
                                         shared.work.context_tokens)) {
      refresh_head(t);
    }
    if (is_leader()) store_release(&t.pending[index], 0);
  }
  cluster_sync();  // the leader's message has been read
}

// ---- at the end of a prefill ------------------------------------------------------------------

__global__ void __launch_bounds__(kRefreshThreads, 4)
    prime_sets_kernel(const __grid_constant__ PrimeSets params) {
  bind_scratch(params.scratch);
  launch_dependents();
  wait_for_predecessor();
  const DecodeTables& t = params.tables;
  const auto kv_head = static_cast<int32_t>(cluster_index());
  const HeadCacheView& head = t.heads[table_index(t, params.slot, params.layer, kv_head)];
  const int width = group_size(t.shape) * t.shape.head_dim;
  const float* query = params.queries + static_cast<int64_t>(kv_head) * width;
  if (attends_all(t.slots[params.slot].rules, head.resident != nullptr, params.layer,
                  params.context_tokens)) {
    return;  // the whole cluster does
  }
  const std::byte* rows = params.layer_rows;
  if (rows != nullptr) {
    rows += kv_head * params.layer_capacity * row_bytes(t.shape);
  } else if (__ldcg(&head.state->has_label) != 0) {
    return;
  }
  if (threadIdx.x == 0) {
    shared.work = {
        params.slot, params.layer, kv_head,       static_cast<int32_t>(params.context_tokens),
        query,       rows,         kRefreshWarps, 0,
        false};
  }
  refresh_head(t);
}

// ---- ahead ------------------------------------------------------------------------------------

inline constexpr int kDecideWarps = 4;

template <int kElements>
__global__ void __launch_bounds__(32 * kDecideWarps)
    decide_ahead_kernel(const __grid_constant__ DecideAhead params) {
  launch_dependents();
  wait_for_predecessor();
  const DecodeTables& t = params.tables;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int i = static_cast<int>(blockIdx.x) * kDecideWarps + static_cast<int>(threadIdx.x) / 32;
  const int num_heads = t.shape.num_kv_heads;
  if (i >= params.rows * num_heads) return;
  const int row = i / num_heads, kv_head = i % num_heads;
  const int slot_index = t.row_slot[row];
  if (slot_index < 0 || t.slots[slot_index].active == 0) return;
  const BatchSlot& slot = t.slots[slot_index];
  // Layer 0 has no layer before it whose input could foresee its query.
  if (slot.rules.predict != PredictRule::kPreviousLayer || params.layer == 0) return;
  const int64_t context = slot.num_tokens + 1;
  const int64_t index = table_index(t, slot_index, params.layer, kv_head);
  if (attends_all(slot.rules, t.heads[index].resident != nullptr, params.layer, context)) return;

  const int group = group_size(t.shape), width = group * t.shape.head_dim;
  const float* query = params.queries + static_cast<int64_t>(i) * width;
  // The true query takes the other place: it may ask while this one is still read.
  const uint8_t turn = query_turn(context - 1);
  float* kept = kept_query(t, index, turn);
  for (int at = lane; at < width; at += 32) kept[at] = query[at];
  HeadLabel<kElements> label;
  label.load(t, slot.rules, index, context, lane);
  const GroupCosines cosines = group_cosines(query, label, group, lane);
  const Decision decision = decide_head(t, slot_index, params.layer, index, label.facts,
                                        cosines.with_label, cosines.way, context, Cause::kForesee);
  __syncwarp();
  if (decision != Decision::kHit && lane == 0) {
    push_job(t, kAhead, slot_index, params.layer, kv_head, turn, context);
  }
}

// Blocks of a cluster on the current device.
int cluster_blocks() {
  static const int blocks = early_launch_supported() ? kClusterBlocks : 1;
  return blocks;
}

template <typename Params>
void launch_clusters(void (*kernel)(Params), int num_clusters, bool early, cudaStream_t stream,
                     const Params& params) {
  const int blocks = cluster_blocks();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_clusters * blocks));
  config.blockDim = dim3(kRefreshThreads);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (blocks > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = static_cast<unsigned>(blocks);
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs].val.clusterDim.z = 1;
    ++config.numAttrs;
  }
  if (early && early_launch_supported()) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  CLO_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

// A multiprocessor keeps the split of its memory between L1 and shared while a block lives on it:
// a refresh block that asked for little shared memory would keep the weight-streaming blocks out.
template <typename Params>
void prefer_shared_memory(void (*kernel)(Params)) {
  CLO_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared));
}

}  // namespace

void refresh_queue(const RefreshQueueParams& params, cudaStream_t stream) {
  static const bool once = (prefer_shared_memory(refresh_queue_kernel), true);
  (void)once;
  launch_clusters(refresh_queue_kernel, params.num_clusters, false, stream, params);
}

void prime_sets(const PrimeSets& params, cudaStream_t stream) {
  launch_clusters(prime_sets_kernel, params.tables.shape.num_kv_heads, true, stream, params);
}

void decide_ahead(const DecideAhead& params, cudaStream_t stream) {
  const int heads = params.rows * params.tables.shape.num_kv_heads;
  if (heads == 0) return;
  const auto grid = static_cast<unsigned>((heads + kDecideWarps - 1) / kDecideWarps);
  launch(params.tables.shape.head_dim == 64 ? decide_ahead_kernel<2> : decide_ahead_kernel<4>,
         dim3(grid), dim3(32 * kDecideWarps), 0, stream, params);
}

}  // namespace clo::kernels
