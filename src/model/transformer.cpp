#include "model/transformer.h"

#include <algorithm>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"

namespace clo {

namespace {

struct Workspace {
  int64_t x, normed, qkv, attended, gate_up, inner, rotary, predicted, logits;
};

Workspace workspace_floats(const ModelConfig& c, int64_t rows, int64_t logit_rows) {
  const int64_t q = c.num_q_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  return {rows * c.hidden_size,
          rows * c.hidden_size,
          rows * (q + 2 * kv),
          rows * q,
          rows * 2 * c.intermediate_size,
          rows * c.intermediate_size,
          rows * (c.head_dim / 2),
          logit_rows * q,
          logit_rows * c.vocab_size};
}

}  // namespace

int64_t Transformer::workspace_bytes(const ModelConfig& config, int64_t max_rows,
                                     int64_t max_logit_rows) {
  const Workspace w = workspace_floats(config, max_rows, max_logit_rows);
  int64_t total = 0;
  for (const int64_t floats : {w.x, w.normed, w.qkv, w.attended, w.gate_up, w.inner, w.rotary,
                               w.rotary, w.predicted, w.logits}) {
    total += round_up(floats * int64_t{sizeof(float)}, Arena::kAlignment);
  }
  return total;
}

Transformer::Transformer(const Weights& weights, Ops& ops, Attention& attention)
    : weights_(&weights),
      ops_(&ops),
      attention_(&attention),
      inverse_frequencies_(
          rope_inverse_frequencies(weights.config().rope, weights.config().head_dim)) {}

Result<Transformer> Transformer::create(const Weights& weights, Ops& ops, Attention& attention,
                                        Arena& arena, int64_t max_rows, int64_t max_logit_rows) {
  Transformer model(weights, ops, attention);
  model.max_rows_ = max_rows;
  model.max_logit_rows_ = max_logit_rows;
  const Workspace w = workspace_floats(weights.config(), max_rows, max_logit_rows);
  const auto take = [&](int64_t floats, float*& target) -> Status {
    CLO_ASSIGN(std::byte* const block, arena.allocate(floats * int64_t{sizeof(float)}));
    target = reinterpret_cast<float*>(block);
    return Ok{};
  };
  CLO_TRY(take(w.x, model.x_));
  CLO_TRY(take(w.normed, model.normed_));
  CLO_TRY(take(w.qkv, model.qkv_));
  CLO_TRY(take(w.attended, model.attended_));
  CLO_TRY(take(w.gate_up, model.gate_up_));
  CLO_TRY(take(w.inner, model.inner_));
  CLO_TRY(take(w.rotary, model.cosine_));
  CLO_TRY(take(w.rotary, model.sine_));
  CLO_TRY(take(w.predicted, model.predicted_));
  CLO_TRY(take(w.logits, model.logits_));
  return model;
}

void Transformer::normalise(const float* weight, int64_t rows) {
  const ModelConfig& c = weights_->config();
  ops_->rms_norm({x_, weight, normed_, rows, c.hidden_size, c.hidden_size, c.rms_norm_eps});
}

void Transformer::make_rotary_table() {
  RotaryTableParams params;
  params.positions = positions_.data();
  params.inverse_frequencies = inverse_frequencies_.data();
  params.cosine = cosine_;
  params.sine = sine_;
  params.attention_factor = static_cast<float>(weights_->config().rope.attention_factor);
  params.num_rows = std::ssize(positions_);
  params.half_dim = static_cast<int32_t>(std::ssize(inverse_frequencies_));
  ops_->rotary_table(params);
}

void Transformer::rotate_heads(float* x, int64_t stride, int64_t num_heads, const float* norm,
                               int64_t rows) {
  const ModelConfig& c = weights_->config();
  RotateParams params;
  params.x = x;
  params.cosine = cosine_;
  params.sine = sine_;
  params.norm_weight = norm;
  params.norm_epsilon = c.rms_norm_eps;
  params.num_rows = rows;
  params.stride = stride;
  params.num_heads = static_cast<int32_t>(num_heads);
  params.head_dim = static_cast<int32_t>(c.head_dim);
  ops_->rotate(params);
}

void Transformer::predict_queries(int32_t layer, int64_t rows) {
  const ModelConfig& c = weights_->config();
  const LayerWeights& next = weights_->layers()[static_cast<size_t>(layer)];
  const int64_t width = c.num_q_heads * c.head_dim;
  normalise(next.input_norm, rows);
  WeightView query = next.qkv;  // Q rows come first
  query.num_rows = width;
  ops_->linear({query, next.qkv_bias, normed_, predicted_, rows, width, false});
  rotate_heads(predicted_, width, c.num_q_heads, next.q_norm, rows);
  attention_->prefetch(layer, predicted_);
}

bool Transformer::run_layers(int64_t rows, const std::function<bool(int32_t)>& proceed) {
  const ModelConfig& c = weights_->config();
  const int64_t q = c.num_q_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  const int64_t stride = q + 2 * kv;
  make_rotary_table();
  const auto num_layers = static_cast<int32_t>(c.num_layers);
  for (int32_t l = 0; l < num_layers; ++l) {
    if (proceed && !proceed(l)) return false;
    const LayerWeights& w = weights_->layers()[static_cast<size_t>(l)];
    if (l + 1 < num_layers && attention_->wants_prediction(l + 1)) predict_queries(l + 1, rows);
    normalise(w.input_norm, rows);
    ops_->linear({w.qkv, w.qkv_bias, normed_, qkv_, rows, stride, false});
    rotate_heads(qkv_, stride, c.num_q_heads, w.q_norm, rows);
    rotate_heads(qkv_ + q, stride, c.num_kv_heads, w.k_norm, rows);
    attention_->append(l, qkv_ + q, qkv_ + q + kv, stride);
    attention_->attend(l, qkv_, stride, attended_);
    ops_->linear({w.output, w.output_bias, attended_, x_, rows, c.hidden_size, true});
    normalise(w.mlp_norm, rows);
    ops_->linear(
        {w.gate_up, w.gate_up_bias, normed_, gate_up_, rows, 2 * c.intermediate_size, false});
    ops_->gated_silu({gate_up_, inner_, rows, c.intermediate_size});
    ops_->linear({w.down, w.down_bias, inner_, x_, rows, c.hidden_size, true});
  }
  return true;
}

std::span<const float> Transformer::logits(int64_t first_row, int64_t rows) {
  if (rows == 0) return {};
  const ModelConfig& c = weights_->config();
  CLO_CHECK(rows <= max_logit_rows_, rows, max_logit_rows_);
  ops_->rms_norm({x_ + first_row * c.hidden_size, weights_->final_norm(), normed_, rows,
                  c.hidden_size, c.hidden_size, c.rms_norm_eps});
  ops_->linear({weights_->head(), nullptr, normed_, logits_, rows, c.vocab_size, false});
  return {logits_, static_cast<size_t>(rows * c.vocab_size)};
}

void Transformer::decode(std::span<const DecodeRow> rows, std::span<DecodeOutcome> outcomes) {
  const int64_t count = std::ssize(rows);
  CLO_CHECK(count <= max_logit_rows_ && count <= max_rows_, count);
  positions_.clear();
  ids_.clear();
  batch_.clear();
  for (const DecodeRow& row : rows) {
    positions_.push_back(row.sequence->num_tokens());
    ids_.push_back(row.token);
    batch_.push_back(row.sequence);
  }
  ops_->embed({weights_->embedding(), ids_.data(), x_, count});
  attention_->begin_decode(batch_);
  run_layers(count, nullptr);
  attention_->end();
  const std::span<const float> all = logits(0, count);
  const auto width = static_cast<size_t>(weights_->config().vocab_size);
  for (size_t i = 0; i < rows.size(); ++i) {
    outcomes[i].kind = DecodeOutcome::Kind::kLogits;
    outcomes[i].logits = all.subspan(i * width, width);
  }
}

std::span<const float> Transformer::prefill(std::span<const int32_t> ids, SequenceKv& sequence,
                                            bool last, const std::function<bool(int32_t)>& proceed,
                                            bool* abandoned) {
  const int64_t rows = std::ssize(ids);
  CLO_CHECK(rows >= 1 && rows <= max_rows_, rows, max_rows_);
  positions_.clear();
  for (int64_t i = 0; i < rows; ++i) positions_.push_back(sequence.num_tokens() + i);
  ops_->embed({weights_->embedding(), ids.data(), x_, rows});
  attention_->begin_prefill(sequence, rows, last);
  *abandoned = !run_layers(rows, proceed);
  if (*abandoned) return {};
  attention_->end();
  return last ? logits(rows - 1, 1) : std::span<const float>();
}

}  // namespace clo
