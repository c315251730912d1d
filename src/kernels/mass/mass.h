#pragma once
// Samples of the attention mass that heads with sets keep. What a head attended to is summed by
// attention itself (log-sum-exp); of the rows that it left out a few are drawn (ops/mass_draw.h)
// and scored, wherever they lie, and each stands for as many as were left out for each drawn:
// kept = attended / (attended + left out). CPU twin: Attention::kept_mass.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decode_tables.h"

namespace clo::kernels {

// The heads that a decode step looks at (SequenceRules::looks), in one launch after the last
// layer's attention, which leaves such heads their sets; jobs that their true queries made for the
// next step are queued here instead. With MassLooks::kAll the slot's counters take every head's
// mass.
struct StepMass {
  DecodeTables tables;
  const float* log_sum_exp = nullptr;  // [num_layers][rows][num_q_heads] of the step's attention
  // [kResultRing][max_batch][kMassLooks] mapped host memory: look j of row r in step s at
  // ((s % kResultRing) * max_batch + r) * kMassLooks + j. All of the step's rows are written.
  MassSample* samples = nullptr;
  int32_t rows = 0;
  bool every_head = false;  // some row has MassLooks::kAll
};
void step_mass(const StepMass& params, cudaStream_t stream);

// The first sets of one layer at the end of a prefill (PrimeSets), for the query that chose them;
// kFirstMassRows are drawn. Rows come from the layer buffer, full ones; what was attended is summed
// here, for no attention has run over it.
struct FirstMass {
  DecodeTables tables;
  const float* queries = nullptr;         // [num_q_heads * head_dim]
  const std::byte* layer_rows = nullptr;  // [num_kv_heads][layer_capacity] rows
  int64_t layer_capacity = 0;
  int64_t context_tokens = 0;
  MassSample* samples = nullptr;  // [num_kv_heads] mapped host memory
  int32_t slot = 0;
  int32_t layer = 0;
};
void first_mass(const FirstMass& params, cudaStream_t stream);

}  // namespace clo::kernels
