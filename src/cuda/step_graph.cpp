// The decode step as a captured graph: which kernels, in which order.
#include <algorithm>
#include <bit>

#include "base/check.h"
#include "cuda/step_recorder.h"
#include "kernels/attend/attend.h"
#include "kernels/mass/mass.h"
#include "kernels/norm/norm.h"
#include "kernels/refresh/refresh.h"
#include "kernels/rows/rows.h"
#include "ops/mass_draw.h"

namespace clo {

using namespace kernels;

namespace {

// Of more rows than the weight-streaming product takes. Sums in f32, the bias is added later.
MatmulShape library_product(const WeightView& weight, int64_t rows) {
  MatmulShape shape{rows, weight.num_rows, weight.num_cols};
  shape.type = weight.type;
  shape.out_type = DType::kF32;
  return shape;
}

}  // namespace

int32_t StepRecorder::product(const WeightView& weight, const void* x, float* parts,
                              int32_t max_splits) {
  cudaStream_t stream = runner_.main_.get();
  const auto plan = [&] {
    return plan_product(weight.blocks, weight.num_rows, weight.num_cols, runner_.device_,
                        max_splits);
  };
  if (weight.blocks != WeightBlocks::kNone) {
    const SkinnyPlan cut = plan();
    // Many rows read the codes again for every 16 of them; plain weights would take more memory
    // than a step has.
    for (int32_t first = 0; first < rows_; first += kSkinnyRows) {
      tiled_linear({weight.blocks, weight.data, x, parts, weight.num_rows, weight.num_cols, first,
                    std::min(kSkinnyRows, rows_ - first), rows_, weight.type},
                   cut, stream);
    }
    return cut.splits;
  }
  if (rows_ <= kSkinnyRows) {
    const SkinnyPlan cut = plan();
    skinny_linear({weight.data, x, parts, weight.num_rows, weight.num_cols, rows_, weight.type},
                  cut, stream);
    return cut.splits;
  }
  runner_.matmul_->run(library_product(weight, rows_), x, weight.data, nullptr, parts, stream);
  return 1;
}

void StepRecorder::begin() {
  const ModelConfig& c = runner_.weights_.config();
  BeginStep params;
  params.tables = runner_.tables_;
  params.table = runner_.weights_.embedding().data;
  params.inverse_frequencies = runner_.buffers_.inverse_frequencies;
  params.x = runner_.buffers_.x;
  params.cosine = runner_.buffers_.cosine;
  params.sine = runner_.buffers_.sine;
  params.attention_factor = static_cast<float>(c.rope.attention_factor);
  params.width = c.hidden_size;
  params.rows = rows_;
  params.half_dim = static_cast<int32_t>(c.head_dim / 2);
  params.type = runner_.weights_.type();
  params.blocks = runner_.weights_.embedding().blocks;
  begin_step(params, runner_.main_.get());
}

void StepRecorder::norm(const float* weight) {
  const ModelConfig& c = runner_.weights_.config();
  AddNorm params;
  params.x = runner_.buffers_.x;
  if (parts_to_add_) {
    params.parts = runner_.buffers_.parts;
    params.splits = parts_;
    params.bias = bias_to_add_;
  }
  params.weight = weight;
  params.out = runner_.buffers_.normed;
  params.rows = rows_;
  params.width = c.hidden_size;
  params.epsilon = c.rms_norm_eps;
  params.type = runner_.weights_.type();
  add_norm(params, runner_.main_.get());
  parts_to_add_ = false;
}

void StepRecorder::predict_queries(int32_t layer) {
  const ModelConfig& c = runner_.weights_.config();
  const StepBuffers& b = runner_.buffers_;
  const LayerWeights& next = weights(layer);
  CLO_CHECK(!parts_to_add_);
  AddNorm norm;
  norm.x = b.x;
  norm.weight = next.input_norm;
  norm.out = b.predicted_normed;
  norm.rows = rows_;
  norm.width = c.hidden_size;
  norm.epsilon = c.rms_norm_eps;
  norm.type = runner_.weights_.type();
  add_norm(norm, runner_.main_.get());
  WeightView query = next.qkv;  // Q rows come first
  query.num_rows = c.num_q_heads * c.head_dim;
  PredictedQueries params;
  params.shape = runner_.system_.shape;
  params.splits = product(query, b.predicted_normed, b.predicted_parts);
  params.parts = b.predicted_parts;
  params.bias = next.qkv_bias;
  params.q_norm = next.q_norm;
  params.cosine = b.cosine;
  params.sine = b.sine;
  params.queries = b.predicted;
  params.norm_epsilon = c.rms_norm_eps;
  params.rows = rows_;
  predicted_queries(params, runner_.main_.get());
  DecideAhead ahead;
  ahead.tables = runner_.tables_;
  ahead.queries = b.predicted;
  ahead.layer = layer;
  ahead.rows = rows_;
  decide_ahead(ahead, runner_.main_.get());
}

void StepRecorder::qkv(int32_t layer) {
  parts_ = product(weights(layer).qkv, runner_.buffers_.normed, runner_.buffers_.parts);
}

void StepRecorder::rows(int32_t layer) {
  const LayerWeights& w = weights(layer);
  DecodeRows params;
  params.tables = runner_.tables_;
  params.splits = parts_;
  params.parts = runner_.buffers_.parts;
  params.bias = w.qkv_bias;
  params.q_norm = w.q_norm;
  params.k_norm = w.k_norm;
  params.cosine = runner_.buffers_.cosine;
  params.sine = runner_.buffers_.sine;
  params.queries = runner_.buffers_.queries;
  params.norm_epsilon = runner_.weights_.config().rms_norm_eps;
  params.layer = layer;
  params.rows = rows_;
  decode_rows(params, runner_.main_.get());
}

void StepRecorder::attend(int32_t layer) {
  AttendRows params;
  params.tables = runner_.tables_;
  params.queries = runner_.buffers_.queries;
  params.out = runner_.buffers_.attended;
  params.parts = runner_.buffers_.attend_parts;
  params.arrivals = runner_.buffers_.arrivals;
  if (looks_ != MassLooks::kNone) {
    params.log_sum_exp =
        runner_.buffers_.log_sum_exp + int64_t{layer} * rows_ * runner_.system_.shape.num_q_heads;
  }
  params.layer = layer;
  params.rows = rows_;
  params.grid = attend_grid(runner_.system_.shape, runner_.device_.num_multiprocessors);
  kernels::attend(params, runner_.main_.get());
}

void StepRecorder::mass() {
  StepMass params;
  params.tables = runner_.tables_;
  params.log_sum_exp = runner_.buffers_.log_sum_exp;
  params.samples = runner_.samples_.as<MassSample>();
  params.rows = rows_;
  params.every_head = looks_ == MassLooks::kAll;
  step_mass(params, runner_.main_.get());
}

void StepRecorder::output(int32_t layer) {
  parts_ = product(weights(layer).output, runner_.buffers_.attended, runner_.buffers_.parts);
  parts_to_add_ = true;
  bias_to_add_ = weights(layer).output_bias;
}

void StepRecorder::gate_up(int32_t layer) {
  parts_ = product(weights(layer).gate_up, runner_.buffers_.normed, runner_.buffers_.parts);
}

void StepRecorder::silu(int32_t layer) {
  GatedSilu params;
  params.splits = parts_;
  params.parts = runner_.buffers_.parts;
  params.bias = weights(layer).gate_up_bias;
  params.out = runner_.buffers_.inner;
  params.rows = rows_;
  params.width = runner_.weights_.config().intermediate_size;
  params.type = runner_.weights_.type();
  gated_silu(params, runner_.main_.get());
}

void StepRecorder::down(int32_t layer) {
  parts_ = product(weights(layer).down, runner_.buffers_.inner, runner_.buffers_.parts);
  parts_to_add_ = true;
  bias_to_add_ = weights(layer).down_bias;
}

void StepRecorder::head() {
  // Logits are read as they are: no parts.
  const int32_t parts =
      product(runner_.weights_.head(), runner_.buffers_.normed, runner_.buffers_.logits, 1);
  CLO_CHECK(parts == 1, parts);
}

void StepRecorder::sample(const GraphKey& key) {
  SampleRows params;
  params.tables = runner_.tables_;
  params.logits = runner_.buffers_.logits;
  params.vocab_size = runner_.weights_.config().vocab_size;
  params.rows = rows_;
  params.results = runner_.results_.as<StepResult>();
  params.words = runner_.words_.as<uint32_t>();
  params.scratch = runner_.buffers_.sample_scratch;
  params.answers = runner_.buffers_.answer_of;
  params.any_sampled = key.draws;
  sample_rows(params, runner_.main_.get());
}

GraphKey CudaRunner::key_of(std::span<SequenceKv* const> rows) const {
  GraphKey key;
  // Powers of two: a batch that grows by one seldom needs a new graph.
  key.rows = std::min<int32_t>(
      static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(rows.size()))), limits_.max_batch);
  for (const SequenceKv* sequence : rows) {
    if (sequence != nullptr) {
      key.draws = key.draws || slots_->draws(*sequence);
      const MassLooks looks = mass_looks(*sequence, forced_);
      if (looks == MassLooks::kAll || looks_at_some(next_context(*sequence))) {
        key.looks = std::max(key.looks, looks);
      }
    }
    if (sequence == nullptr || sequence->is_dense_layer(system_.shape.num_layers - 1)) continue;
    key.predict_layer = key.predict_layer || sequence->policy().predict == Predict::kPreviousLayer;
  }
  return key;
}

void CudaRunner::prepare_products(int32_t rows) {
  if (rows <= kSkinnyRows) return;
  const LayerWeights& w = weights_.layers().front();
  WeightView query = w.qkv;
  query.num_rows = weights_.config().num_q_heads * weights_.config().head_dim;
  for (const WeightView& weight : {w.qkv, query, w.output, w.gate_up, w.down, weights_.head()}) {
    if (weight.blocks == WeightBlocks::kNone) matmul_->prepare(library_product(weight, rows));
  }
}

const GraphExec& CudaRunner::graph(const GraphKey& key) {
  GraphExec& exec = graphs_[key];
  if (!exec) {
    // Kernels are loaded on their first use, and that may wait for all that runs.
    stop_refreshes();
    prepare_products(key.rows);
    exec = GraphExec(main_, [&] { record_step(key); });
  }
  return exec;
}

void CudaRunner::record_step(const GraphKey& key) {
  StepRecorder step(*this, key.rows, key.looks);
  step.begin();
  const int32_t num_layers = system_.shape.num_layers;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const LayerWeights& w = weights_.layers()[static_cast<size_t>(layer)];
    step.norm(w.input_norm);
    if (key.predict_layer && layer + 1 < num_layers) step.predict_queries(layer + 1);
    step.qkv(layer);
    step.rows(layer);
    step.attend(layer);
    // The product that follows reads its weights ahead meanwhile.
    if (layer + 1 == num_layers && key.looks != MassLooks::kNone) step.mass();
    step.output(layer);
    step.norm(w.mlp_norm);
    step.gate_up(layer);
    step.silu(layer);
    step.down(layer);
  }
  step.norm(weights_.final_norm());
  step.head();
  step.sample(key);
}

}  // namespace clo
