#pragma once
// From logits to the next token, on the device: the id goes into the slot for the next step and
// into mapped host memory for the engine. Greedy is a true argmax, the lowest id on ties; sampling
// follows the CPU sampler (engine/sampler): penalty, temperature, top-k, top-p, min-p, then a draw
// by Philox 4x32-10 on (seed, position). A row with a logit that is not finite is marked and harms
// no other.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decode_tables.h"

namespace clo::kernels {

// Results of the latest steps are kept apart: one may be launched ahead while the host still reads
// the one before.
inline constexpr uint32_t kResultRing = 4;

// Of a weight in fixed point (44 bits after the point), this many add up to less than 2^63.
inline constexpr int64_t kMaxVocab = int64_t{1} << 19;

struct SampleRows {
  DecodeTables tables;
  const float* logits = nullptr;  // [rows, vocab_size]
  int64_t vocab_size = 0;         // at most kMaxVocab
  int32_t rows = 0;
  // [max_batch] (device): answers[slot][i] is the i-th token of the slot's answer, for the penalty.
  // The kernel appends at [num_answered]; earlier ones, and room for all that may come, are the
  // caller's. Null, or null for a slot: not kept, and no penalty.
  int32_t* const* answers = nullptr;
  const int32_t* forced = nullptr;  // [rows] token to take instead of a sampled one, -1: none;
                                    // null: none at all. Mapped host memory.
  StepResult* results = nullptr;  // [kResultRing][max_batch] mapped host memory; row r of step s at
                                  // (s % kResultRing) * max_batch + r
  // [3] mapped host memory: [1] queue->fault, [2] jobs ever queued (modulo 2^32), then [0] the step
  // number, when all results are written; or null.
  uint32_t* words = nullptr;
  // Some row may have a temperature or a penalty: adds the kernel that draws. Without it such rows
  // are served greedily, so a caller picks the graph by what its sequences ask for.
  bool any_sampled = false;
  std::byte* scratch = nullptr;  // sample_scratch_bytes(rows, vocab_size), zero before first use
};
int64_t sample_scratch_bytes(int32_t rows, int64_t vocab_size);  // left zero by every launch

// The last kernel of a decode graph: it also counts the step's token in (num_tokens, num_answered)
// and, unless tables.queue is null, tells the refresh clusters that the layers are done. A row
// without an active slot gets token 0 and changes nothing.
void sample_rows(const SampleRows& params, cudaStream_t stream);

}  // namespace clo::kernels
