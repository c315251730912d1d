#pragma once
// The layer order of the Llama, Qwen2 and Qwen3 families: token ids and positions in, logits out.
// Holds weights' views and a workspace, no sequence state: that is Attention's. One step at a
// time, from the engine thread.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "model/weights.h"

namespace clo {

class Transformer {
 public:
  // All outlive the transformer. `max_rows`: the most tokens of one step (a prefill chunk or a
  // decode batch). Workspace comes from `arena`. Fails: kDeviceMemory.
  static Result<Transformer> create(const Weights& weights, Ops& ops, Attention& attention,
                                    Arena& arena, int64_t max_rows, int64_t max_logit_rows);
  // Bytes create() takes from the arena.
  static int64_t workspace_bytes(const ModelConfig& config, int64_t max_rows,
                                 int64_t max_logit_rows);

  // One decode step: one token per sequence of the batch. Returns logits [batch, vocab_size],
  // valid until the next step.
  std::span<const float> decode(std::span<const int32_t> ids, std::span<SequenceKv* const> batch);

  // Prefill of the next `ids` of one sequence. With `last`, the first sets are primed. Returns
  // logits of the last `num_logits` tokens [num_logits, vocab_size]; 0: none are computed.
  // `proceed` is asked between layers; when it says no, the step is abandoned and nothing counts
  // as appended (empty result, *abandoned set).
  std::span<const float> prefill(std::span<const int32_t> ids, SequenceKv& sequence, bool last,
                                 int64_t num_logits, const std::function<bool()>& proceed,
                                 bool* abandoned);

 private:
  Transformer(const Weights& weights, Ops& ops, Attention& attention);
  // positions_ -> cosine_, sine_.
  void make_rotary_table();
  // Runs all layers over x_; false when abandoned.
  bool run_layers(int64_t rows, const std::function<bool()>& proceed);
  // Queries of `layer` foreseen from x_, into predicted_.
  void predict_queries(int32_t layer, int64_t rows);
  void rotate_heads(float* x, int64_t stride, int64_t num_heads, const float* norm, int64_t rows);
  void normalise(const float* weight, int64_t rows);  // x_ -> normed_
  std::span<const float> logits(int64_t first_row, int64_t rows);

  const Weights* weights_;
  Ops* ops_;
  Attention* attention_;
  std::vector<float> inverse_frequencies_;
  std::vector<int64_t> positions_;
  // Workspace in the device arena.
  float* x_ = nullptr;          // [max_rows, hidden_size] residual stream
  float* cosine_ = nullptr;     // [max_rows, head_dim / 2] of this step's positions
  float* sine_ = nullptr;       // [max_rows, head_dim / 2]
  float* normed_ = nullptr;     // [max_rows, hidden_size]
  float* qkv_ = nullptr;        // [max_rows, (num_q_heads + 2 num_kv_heads) * head_dim]
  float* attended_ = nullptr;   // [max_rows, num_q_heads * head_dim]
  float* gate_up_ = nullptr;    // [max_rows, 2 * intermediate_size]
  float* inner_ = nullptr;      // [max_rows, intermediate_size]
  float* predicted_ = nullptr;  // [max_logit_rows, num_q_heads * head_dim]
  float* logits_ = nullptr;     // [max_logit_rows, vocab_size]
  int64_t max_rows_ = 0;
  int64_t max_logit_rows_ = 0;
};

}  // namespace clo
