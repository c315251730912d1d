#pragma once
// The end of a step: whichever block is last to arrive turns the rows' choices into tokens and
// tells whoever waits.
#include "kernels/launch.cuh"
#include "kernels/sample/order.cuh"
#include "kernels/sample/sample.h"

namespace clo::kernels {

// Zero between launches.
struct SampleScratch {
  uint32_t* arrivals;  // blocks that are done
  Order* best;         // [rows] packed; kNotFinite: a logit of the row is not finite

  __host__ __device__ explicit SampleScratch(std::byte* data)
      : arrivals(reinterpret_cast<uint32_t*>(data)), best(reinterpret_cast<Order*>(data + 16)) {}
};

// The slot of a row that has one and is to be served, otherwise null.
__device__ __forceinline__ BatchSlot* active_slot(const SampleRows& p, int32_t row) {
  const int32_t slot = p.tables.row_slot[row];
  return slot >= 0 && p.tables.slots[slot].active != 0 ? p.tables.slots + slot : nullptr;
}

// Called by every thread of `num_blocks` blocks: true in all threads of the last one, which then
// sees what the others wrote.
__device__ __forceinline__ bool arrive_last(uint32_t* arrivals, uint32_t num_blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrivals, 1) == num_blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

__device__ __forceinline__ void end_step(const SampleRows& p, const SampleScratch& scratch) {
  RefreshQueue* const queue = p.tables.queue;
  const uint32_t step = queue != nullptr ? queue->step : 0;
  StepResult* const results =
      p.results + static_cast<int64_t>(step % kResultRing) * p.tables.max_batch;
  for (int32_t row = threadIdx.x; row < p.rows; row += blockDim.x) {
    const Order best = atomicExch(&scratch.best[row], Order{0});
    StepResult result;
    if (BatchSlot* const slot = active_slot(p, row); slot != nullptr) {
      result.finite = best != kNotFinite;
      if (result.finite != 0) {
        const int32_t forced = p.forced != nullptr ? p.forced[row] : -1;
        result.token = forced >= 0 ? forced : id_of(packed(best));
      }
      if (p.answers != nullptr) {
        int32_t* const answer = p.answers[slot - p.tables.slots];
        if (answer != nullptr) answer[slot->num_answered] = result.token;
      }
      slot->token = result.token;
      slot->num_tokens += 1;
      slot->num_answered += 1;
    }
    results[row] = result;
  }
  __threadfence_system();  // results, before the word that announces them
  __syncthreads();
  if (threadIdx.x != 0) return;
  *scratch.arrivals = 0;
  if (queue == nullptr) return;
  if (p.words != nullptr) {
    p.words[1] = load_acquire(&queue->fault);
    p.words[2] = static_cast<uint32_t>(queue->rings[kUrgent].tail + queue->rings[kAhead].tail);
    store_release_system(p.words, step);
  }
}

}  // namespace clo::kernels
