#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/launch.cuh"
#include "kernels/refresh/decide.cuh"
#include "kernels/refresh/refresh.h"
#include "kernels/refresh/refresh_head.cuh"

namespace clo::kernels {

namespace {

__device__ __forceinline__ bool is_leader() { return cluster_rank() == 0 && threadIdx.x == 0; }

__device__ __forceinline__ void report_fault(const DecodeTables& t, FaultCode code) {
  atomicCAS(&t.queue->fault, 0u, static_cast<uint32_t>(code));
}

// A word that other blocks change, as it is now.
__device__ __forceinline__ unsigned long long load_now(const unsigned long long* word) {
  return *static_cast<const volatile unsigned long long*>(word);
}

// ---- jobs from the queue ----------------------------------------------------------------------

// Takes the oldest job; slot -1: there will be none, leave. `served`: the step before this
// launch's.
__device__ __noinline__ HeadWork next_job(const DecodeTables& t, bool drain, uint32_t served) {
  RefreshQueue* queue = t.queue;
  HeadWork work = {};
  work.slot = -1;
  const unsigned long long started = global_timer_ns();
  for (;;) {
    if (load_acquire(&queue->fault) != 0) return work;
    if (!drain && static_cast<int32_t>(load_acquire(&queue->layers_done) - served) > 0) {
      return work;
    }
    const unsigned long long position = load_now(&queue->head);
    const RefreshJob& entry = t.jobs[position & (t.queue_capacity - 1)];
    if (load_acquire(&entry.ticket) == static_cast<uint32_t>(position + 1)) {
      // Read before it is claimed: the entry may be filled anew as soon as the head has moved.
      const int32_t slot = __ldcg(&entry.slot), layer = __ldcg(&entry.layer);
      const int32_t kv_head = __ldcg(&entry.kv_head), context = __ldcg(&entry.context_tokens);
      __threadfence();
      if (atomicCAS(&queue->head, position, position + 1) != position) continue;
      work.slot = slot;
      work.layer = layer;
      work.kv_head = kv_head;
      work.context_tokens = context;
      work.query = last_query(t, slot, layer, kv_head);
      work.counted = true;
      return work;
    }
    if (drain && position >= load_now(&queue->tail)) return work;
    if (global_timer_ns() - started > kWatchdogNs) {
      report_fault(t, FaultCode::kRefreshStuck);
      return work;
    }
    __nanosleep(100);
  }
}

// The last cluster to leave notes which step has ended: no cluster of this launch needs the old
// number any more.
__device__ void leave_queue(const DecodeTables& t) {
  RefreshQueue* queue = t.queue;
  if (atomicAdd(&queue->clusters_left, 1u) + 1 < num_clusters()) return;
  queue->clusters_left = 0;
  queue->refresh_step = load_acquire(&queue->layers_done);
}

__global__ void __launch_bounds__(kRefreshThreads, 4)
    refresh_queue_kernel(const __grid_constant__ RefreshQueueParams params) {
  bind_scratch(params.scratch, params.fetch_warps);
  wait_for_predecessor();
  const DecodeTables& t = params.tables;
  const uint32_t served = load_acquire(&t.queue->refresh_step);
  for (int turn = 0;; turn ^= 1) {
    if (is_leader()) shared.message[turn] = next_job(t, params.drain, served);
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
  if (is_leader() && !params.drain) leave_queue(t);
}

// ---- at once ----------------------------------------------------------------------------------

// Executed by one thread. False: it gave up.
__device__ bool wait_until_refreshed(const DecodeTables& t, int64_t index) {
  if (load_acquire(&t.pending[index]) == 0) return true;
  const unsigned long long started = global_timer_ns();
  while (load_acquire(&t.pending[index]) != 0) {
    if (load_acquire(&t.queue->fault) != 0) return false;
    if (global_timer_ns() - started > kWatchdogNs) {
      report_fault(t, FaultCode::kRefreshStuck);
      return false;
    }
    __nanosleep(100);
  }
  return true;
}

__global__ void __launch_bounds__(kRefreshThreads, 4)
    refresh_now_kernel(const __grid_constant__ RefreshNow params) {
  bind_scratch(params.scratch);
  launch_dependents();
  wait_for_predecessor();
  const DecodeTables& t = params.tables;
  const int num_heads = t.shape.num_kv_heads;
  int turn = 0;
  for (int i = static_cast<int>(cluster_index()); i < params.rows * num_heads;
       i += static_cast<int>(num_clusters())) {
    const int row = i / num_heads, kv_head = i % num_heads;
    const int slot_index = t.row_slot[row];
    if (slot_index < 0 || t.slots[slot_index].active == 0) continue;
    const BatchSlot& slot = t.slots[slot_index];
    const SequenceRules& rules = slot.rules;
    const bool foreseen = (rules.predict == PredictRule::kPreviousLayer && params.layer > 0) ||
                          rules.predict == PredictRule::kPreviousStep;
    if (foreseen && !rules.correct) continue;
    const int64_t index = table_index(t, slot_index, params.layer, kv_head);
    const int64_t context = slot.num_tokens + 1;
    if (attends_all(rules, t.heads[index].resident != nullptr, params.layer, context)) continue;

    const int64_t width = static_cast<int64_t>(group_size(t.shape)) * t.shape.head_dim;
    const float* query = params.queries + (static_cast<int64_t>(row) * num_heads + kv_head) * width;
    if (cluster_rank() == 0 && threadIdx.x < 32) {
      bool wanted = threadIdx.x == 0 && wait_until_refreshed(t, index);
      wanted = __shfl_sync(0xFFFFFFFFu, wanted, 0);
      __threadfence();
      if (wanted) {
        wanted = decide_head(t, slot_index, params.layer, kv_head, query, context,
                             foreseen ? Cause::kCorrect : Cause::kDecide) != Decision::kHit;
      }
      if (threadIdx.x == 0) shared.message[turn].slot = wanted ? slot_index : -1;
    }
    cluster_sync();
    const bool wanted = shared_of(&shared.message[turn], 0)->slot >= 0;
    turn ^= 1;  // see refresh_queue_kernel
    if (!wanted) continue;
    __threadfence();
    if (threadIdx.x == 0) {
      shared.work = {slot_index, params.layer, kv_head, static_cast<int32_t>(context),
                     query,      nullptr,      true};
    }
    refresh_head(t);
  }
  cluster_sync();
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
  if (cluster_rank() == 0) {
    float* kept = last_query(t, params.slot, params.layer, kv_head);
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kRefreshThreads) {
      kept[i] = query[i];
    }
  }
  if (attends_all(t.slots[params.slot].rules, head.resident != nullptr, params.layer,
                  params.context_tokens)) {
    return;  // the whole cluster does
  }
  if (threadIdx.x == 0) {
    shared.work = {
        params.slot, params.layer,
        kv_head,     static_cast<int32_t>(params.context_tokens),
        query,       params.layer_rows + kv_head * params.layer_capacity * row_bytes(t.shape),
        false};
  }
  refresh_head(t);
}

// ---- ahead ------------------------------------------------------------------------------------

inline constexpr int kDecideWarps = 4;

__global__ void __launch_bounds__(32 * kDecideWarps)
    decide_ahead_kernel(const __grid_constant__ DecideAhead params) {
  launch_dependents();
  wait_for_predecessor();
  const DecodeTables& t = params.tables;
  const int i = static_cast<int>(blockIdx.x) * kDecideWarps + static_cast<int>(threadIdx.x) / 32;
  const int num_heads = t.shape.num_kv_heads;
  if (i >= params.rows * num_heads) return;
  const int row = i / num_heads, kv_head = i % num_heads;
  const int slot_index = t.row_slot[row];
  if (slot_index < 0 || t.slots[slot_index].active == 0) return;
  // Layer 0 has no layer before it whose input could foresee its query.
  if (t.slots[slot_index].rules.predict != PredictRule::kPreviousLayer || params.layer == 0) return;
  const int64_t width = static_cast<int64_t>(group_size(t.shape)) * t.shape.head_dim;
  decide_and_queue(t, slot_index, params.layer, kv_head,
                   params.queries + (static_cast<int64_t>(row) * num_heads + kv_head) * width,
                   t.slots[slot_index].num_tokens + 1);
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

void refresh_now(const RefreshNow& params, cudaStream_t stream) {
  static const bool once = (prefer_shared_memory(refresh_now_kernel), true);
  (void)once;
  const int heads = params.rows * params.tables.shape.num_kv_heads;
  if (heads == 0) return;
  launch_clusters(refresh_now_kernel, std::min(params.num_clusters, heads), true, stream, params);
}

void prime_sets(const PrimeSets& params, cudaStream_t stream) {
  launch_clusters(prime_sets_kernel, params.tables.shape.num_kv_heads, true, stream, params);
}

void decide_ahead(const DecideAhead& params, cudaStream_t stream) {
  const int heads = params.rows * params.tables.shape.num_kv_heads;
  if (heads == 0) return;
  const auto grid = static_cast<unsigned>((heads + kDecideWarps - 1) / kDecideWarps);
  launch(decide_ahead_kernel, dim3(grid), dim3(32 * kDecideWarps), 0, stream, params);
}

}  // namespace clo::kernels
