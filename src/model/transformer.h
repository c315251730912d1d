#pragma once
// The layer order of the Llama, Qwen2 and Qwen3 families: token ids and positions in, logits out.
// Holds weights' views and a workspace, no sequence state: that is Attention's. One step at a
// time, from the engine thread.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "model/runner.h"
#include "model/weights.h"

namespace clo {

class Transformer final : public Runner {
 public:
  // All outlive the transformer. `max_rows`: the most tokens of one step (a prefill chunk or a
  // decode batch). Workspace comes from `arena`. Fails: kDeviceMemory.
  static Result<Transformer> create(const Weights& weights, Ops& ops, Attention& attention,
                                    Arena& arena, int64_t max_rows, int64_t max_logit_rows);
  // Bytes create() takes from the arena.
  static int64_t workspace_bytes(const ModelConfig& config, int64_t max_rows,
                                 int64_t max_logit_rows);

  std::string description() const override { return ops_->description(); }
  void begin(SequenceKv&, const SamplingOptions&) override {}
  void end(SequenceKv&) override {}
  void read_counters(SequenceKv&) override {}
  std::span<const float> prefill(std::span<const int32_t> ids, SequenceKv& sequence, bool last,
                                 const std::function<bool(int32_t)>& proceed,
                                 bool* abandoned) override;
  // Always answers with logits.
  void decode(std::span<const DecodeRow> rows, std::span<DecodeOutcome> outcomes) override;

 private:
  Transformer(const Weights& weights, Ops& ops, Attention& attention);
  // positions_ -> cosine_, sine_.
  void make_rotary_table();
  // Runs all layers over x_; false when abandoned.
  bool run_layers(int64_t rows, const std::function<bool(int32_t)>& proceed);
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
  std::vector<int32_t> ids_;
  std::vector<SequenceKv*> batch_;
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
