// Greedy needs one look at the logits by many blocks. Rows that sample or are penalised get a
// second kernel, one block each.
#include <algorithm>

#include "base/check.h"
#include "base/units.h"
#include "kernels/launch.cuh"
#include "kernels/sample/draw.cuh"
#include "kernels/sample/sample.h"

namespace clo::kernels {

namespace {

constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxLoads = 16;  // per thread, all in flight
constexpr int kArgmaxChunk = kArgmaxThreads * kArgmaxLoads;

// grid (chunks of the vocabulary, rows). Words of 4 bytes, since a row may start at any of them.
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_kernel(const __grid_constant__ SampleRows p) {
  launch_dependents();
  wait_for_predecessor();
  const SampleScratch scratch(p.scratch);
  const auto row = static_cast<int32_t>(blockIdx.y);
  if (active_slot(p, row) != nullptr) {
    const float* const logits = p.logits + row * p.vocab_size;
    const auto vocab_size = static_cast<int32_t>(p.vocab_size);
    const auto first = static_cast<int32_t>(blockIdx.x * kArgmaxChunk + threadIdx.x);
    float logit[kArgmaxLoads];
#pragma unroll
    for (int i = 0; i < kArgmaxLoads; ++i) {
      const int32_t id = first + i * kArgmaxThreads;
      logit[i] = id < vocab_size ? logits[id] : 0;
    }
    Order best = 0;
#pragma unroll
    for (int i = 0; i < kArgmaxLoads; ++i) {
      const int32_t id = first + i * kArgmaxThreads;
      if (id >= vocab_size) break;
      const bool finite = logit[i] - logit[i] == 0;
      best = max(best, finite ? packed(order_of(logit[i], id)) : kNotFinite);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      best = max(best, __shfl_xor_sync(0xFFFFFFFFu, best, offset));
    }
    if (threadIdx.x % 32 == 0) atomicMax(&scratch.best[row], best);
  }
  if (p.any_sampled) return;  // the kernel that draws ends the step
  if (arrive_last(scratch.arrivals, gridDim.x * gridDim.y)) end_step(p, scratch);
}

int64_t seen_bytes(int64_t vocab_size) { return round_up(vocab_size, 32) / 8; }

// One block per row; greedy rows without a penalty keep the argmax.
__global__ void __launch_bounds__(kDrawThreads) draw_kernel(const __grid_constant__ SampleRows p) {
  launch_dependents();
  wait_for_predecessor();
  extern __shared__ __align__(16) std::byte memory[];
  DrawShared& shared = *reinterpret_cast<DrawShared*>(memory);
  auto* const seen = reinterpret_cast<uint32_t*>(memory + sizeof(DrawShared));

  const SampleScratch scratch(p.scratch);
  const auto row = static_cast<int32_t>(blockIdx.x);
  const BatchSlot* const slot = active_slot(p, row);
  if (slot != nullptr && scratch.best[row] != kNotFinite) {
    const SamplingRules& rules = slot->sampling;
    const int32_t* const answer = p.answers != nullptr ? p.answers[slot - p.tables.slots] : nullptr;
    const bool penalty = rules.repetition_penalty != 1 && answer != nullptr;
    const auto vocab_size = static_cast<int32_t>(p.vocab_size);
    if (penalty) {
      for (int32_t i = threadIdx.x; i * 32 < vocab_size; i += kDrawThreads) seen[i] = 0;
      __syncthreads();
      for (int64_t i = threadIdx.x; i < slot->num_answered; i += kDrawThreads) {
        const int32_t id = answer[i];
        if (id >= 0 && id < vocab_size) atomicOr(&seen[id / 32], 1u << (id % 32));
      }
      __syncthreads();
    }
    if (penalty || rules.temperature > 0) {
      const Scores scores = {.logits = p.logits + row * p.vocab_size,
                             .vocab_size = vocab_size,
                             .seen = penalty ? seen : nullptr,
                             .penalty = rules.repetition_penalty};
      const int32_t token = Draw(scores, rules, shared).run(rules, slot->num_answered);
      if (threadIdx.x == 0) scratch.best[row] = packed(order_of(0, token));
    }
  }
  if (arrive_last(scratch.arrivals, gridDim.x)) end_step(p, scratch);
}

}  // namespace

int64_t sample_scratch_bytes(int32_t rows, int64_t /*vocab_size*/) {
  return 16 + rows * static_cast<int64_t>(sizeof(Order));
}

void sample_rows(const SampleRows& params, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1 && params.rows <= 65535, params.rows);
  CLO_CHECK(params.vocab_size >= 1 && params.vocab_size <= kMaxVocab, params.vocab_size);
  static const bool ready = [] {
    CLO_CUDA(cudaFuncSetAttribute(draw_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(sizeof(DrawShared) + seen_bytes(kMaxVocab))));
    // As norm/ and linear/: one split of L1 and shared memory in all kernels of a step.
    CLO_CUDA(cudaFuncSetAttribute(draw_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
    CLO_CUDA(cudaFuncSetAttribute(argmax_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
    return true;
  }();
  (void)ready;
  const auto chunks = static_cast<unsigned>(divide_up(params.vocab_size, kArgmaxChunk));
  const auto rows = static_cast<unsigned>(params.rows);
  launch(argmax_kernel, dim3(chunks, rows), dim3(kArgmaxThreads), 0, stream, params);
  if (!params.any_sampled) return;
  launch(draw_kernel, dim3(rows), dim3(kDrawThreads),
         sizeof(DrawShared) + static_cast<size_t>(seen_bytes(params.vocab_size)), stream, params);
}

}  // namespace clo::kernels
