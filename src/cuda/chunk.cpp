// Prefill: one chunk of a prompt through all layers. The layer's rows are laid side by side in a
// layer buffer, which attention reads; from there they go to where the sequence keeps them and, on
// a copy stream while the next layer computes, to the host store. Two buffers take turns.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "cuda/step_recorder.h"
#include "kernels/mass/mass.h"
#include "kernels/norm/norm.h"
#include "kernels/prefill/prefill.h"
#include "kernels/refresh/difficulty.h"
#include "kernels/refresh/refresh.h"
#include "kernels/rows/rows.h"
#include "select/set_rule.h"

namespace clo {

using namespace kernels;

namespace {

// Lanes of a timeline.
constexpr const char* kCompute = "compute";
constexpr const char* kToHost = "rows to the host";
constexpr const char* kFromHost = "rows from the host";

// Blocks that read host rows back: the compute stream waits for them, so they may take more than
// the few that saturate the link.
constexpr int32_t kLoadBlocks = 16;
constexpr int32_t kStoreBlocks = 8;

}  // namespace

WeightView CudaRunner::expanded(const WeightView& weight, void* scratch) {
  if (weight.blocks == WeightBlocks::kNone) return weight;
  expand_tiles({weight.blocks, weight.data, scratch, weight.num_rows, weight.num_cols, weight.type},
               main_.get());
  WeightView plain = weight;
  plain.data = static_cast<const std::byte*>(scratch);
  plain.blocks = WeightBlocks::kNone;
  plain.tiled = false;
  return plain;
}

void CudaRunner::multiply(const WeightView& weight, const void* bias, const void* x, int64_t rows,
                          void* out) {
  MatmulShape shape{rows, weight.num_rows, weight.num_cols};
  shape.type = shape.out_type = weight.type;
  shape.bias = bias != nullptr;
  matmul_->run(shape, x, weight.data, bias, out, main_.get());
}

void CudaRunner::multiply_add(const WeightView& weight, const float* bias, const void* x,
                              int64_t rows, float* out) {
  MatmulShape shape{rows, weight.num_rows, weight.num_cols};
  shape.type = weight.type;
  shape.out_type = DType::kF32;
  shape.bias = bias != nullptr;
  shape.accumulate = true;
  matmul_->run(shape, x, weight.data, bias, out, main_.get());
}

const void* CudaRunner::library_bias(const void* biases, const WeightView& weight, int32_t layer) {
  if (biases == nullptr) return nullptr;
  return static_cast<const std::byte*>(biases) + layer * weight.num_rows * 2;
}

void CudaRunner::load_earlier_rows(SequenceKv& sequence, int32_t layer) {
  const int64_t first = sequence.num_tokens();
  if (first == 0) return;
  const int buffer = layer % kLayerBuffers;
  // The rows that lay there have left for the host.
  stored_[buffer].make_wait(copy_in_);
  std::byte* const layer_rows = buffers_.layer_rows[buffer];
  if (sequence.pages().empty()) {
    // Without a host copy every head keeps all its rows on the device.
    const int64_t row_bytes = system_.shape.row_bytes();
    if (system_.shape.compressed()) {
      // The views' table is what the device reads anyway.
      expand_resident({system_.shape, slots_->device_heads(sequence, layer), layer_rows,
                       limits_.layer_tokens, first},
                      copy_in_.get());
      loaded_[buffer].record(copy_in_);
      return;
    }
    for (int32_t h = 0; h < system_.shape.num_kv_heads; ++h) {
      CLO_CUDA(cudaMemcpyAsync(
          layer_rows + h * limits_.layer_tokens * row_bytes, sequence.head(layer, h).resident,
          static_cast<size_t>(first * row_bytes), cudaMemcpyDeviceToDevice, copy_in_.get()));
    }
    loaded_[buffer].record(copy_in_);
    return;
  }
  MovePages move;
  move.layout = tables_.host;
  move.host_rows = tables_.host_rows;
  move.pages = slots_->device_pages(sequence);
  move.layer_rows = layer_rows;
  move.layer_capacity = limits_.layer_tokens;
  move.end_token = first;
  move.layer = layer;
  move.num_blocks = kLoadBlocks;
  move.to_host = false;
  timed(copy_in_, kFromHost, "earlier rows", layer, [&] { move_pages(move, copy_in_.get()); });
  loaded_[buffer].record(copy_in_);
}

void CudaRunner::chunk_attention(int32_t layer, int64_t first, int64_t rows) {
  PrefillAttention params;
  params.shape = system_.shape;
  params.queries = buffers_.chunk_queries;
  params.layer_rows = buffers_.layer_rows[layer % kLayerBuffers];
  params.layer_capacity = limits_.layer_tokens;
  params.out = buffers_.chunk_normed;
  params.first_token = first;
  params.num_tokens = rows;
  params.scale = tables_.scale;
  if (sdpa_ != nullptr) {
    const auto workspace = sdpa_->workspace_bytes(params);
    std::string reason;
    if (!workspace) {
      reason = workspace.error().message;
    } else if (*workspace > kSdpaWorkspace) {
      reason = "cuDNN wants a workspace of " + std::to_string(*workspace) + " bytes";
    } else {
      const Status done = sdpa_->attention(params, buffers_.sdpa_workspace, main_.get());
      if (done) return;
      reason = done.error().message;
    }
    // Said in the report: this shape is not cuDNN's.
    attention_kernel_ = "own kernel (" + reason + ")";
    sdpa_ = nullptr;
  }
  prefill_attention(params, main_.get());
}

void CudaRunner::mlp_rows(int32_t layer, int64_t rows) {
  const ModelConfig& c = weights_.config();
  const LayerWeights& w = weights_.layers()[static_cast<size_t>(layer)];
  const WeightView gate_up = expanded(w.gate_up, buffers_.expanded);
  const WeightView down = expanded(w.down, buffers_.expanded_down);
  auto* normed = static_cast<std::byte*>(buffers_.chunk_normed);
  for (int64_t at = 0; at < rows; at += kMlpRows) {
    const int64_t here = std::min(kMlpRows, rows - at);
    multiply(gate_up, library_bias(buffers_.gate_up_bias, w.gate_up, layer),
             normed + at * c.hidden_size * 2, here, buffers_.chunk_gate_up);
    gated_silu_rows(
        {buffers_.chunk_gate_up, buffers_.chunk_inner, here, c.intermediate_size, weights_.type()},
        main_.get());
    multiply_add(down, w.down_bias, buffers_.chunk_inner, here,
                 buffers_.chunk_x + at * c.hidden_size);
  }
}

void CudaRunner::copy_observed(int32_t layer, int64_t first, int64_t rows) {
  const KvShape& shape = system_.shape;
  const int64_t row_bytes = shape.row_bytes();
  auto* target = observed_[layer % kLayerBuffers].as<std::byte>();
  const std::byte* const layer_rows = buffers_.layer_rows[layer % kLayerBuffers];
  for (int32_t h = 0; h < shape.num_kv_heads; ++h, target += rows * row_bytes) {
    CLO_CUDA(cudaMemcpyAsync(target, layer_rows + (h * limits_.layer_tokens + first) * row_bytes,
                             static_cast<size_t>(rows * row_bytes), cudaMemcpyDeviceToHost,
                             main_.get()));
  }
  CLO_CUDA(cudaMemcpyAsync(target, buffers_.chunk_queries,
                           static_cast<size_t>(rows * shape.num_q_heads * shape.head_dim * 2),
                           cudaMemcpyDeviceToHost, main_.get()));
}

void CudaRunner::show_observed(int32_t layer, int64_t first, int64_t rows) {
  const KvShape& shape = system_.shape;
  const auto* const copied = observed_[layer % kLayerBuffers].as<const std::byte>();
  PrefillRows shown;
  shown.first_token = first;
  shown.num_tokens = rows;
  shown.keys = copied;
  shown.key_head_bytes = rows * shape.row_bytes();
  shown.key_token_bytes = shape.row_bytes();
  shown.queries = copied + shape.num_kv_heads * rows * shape.row_bytes();
  shown.query_type = weights_.type();
  shown.query_token_bytes = int64_t{shape.num_q_heads} * shape.head_dim * 2;
  system_.observer->on_prefill(shape, layer, shown);
}

void CudaRunner::chunk_layer(SequenceKv& sequence, int32_t layer, int64_t rows, bool last) {
  const ModelConfig& c = weights_.config();
  const KvShape& shape = system_.shape;
  const LayerWeights& w = weights_.layers()[static_cast<size_t>(layer)];
  const int64_t first = sequence.num_tokens();
  const int buffer = layer % kLayerBuffers;
  cudaStream_t stream = main_.get();

  AddNorm norm;
  norm.x = buffers_.chunk_x;
  norm.weight = w.input_norm;
  norm.out = buffers_.chunk_normed;
  norm.rows = rows;
  norm.width = c.hidden_size;
  norm.epsilon = c.rms_norm_eps;
  norm.type = weights_.type();
  timed(main_, kCompute, "norm and QKV", layer, [&] {
    add_norm(norm, stream);
    multiply(expanded(w.qkv, buffers_.expanded), library_bias(buffers_.qkv_bias, w.qkv, layer),
             buffers_.chunk_normed, rows, buffers_.chunk_qkv);
  });

  stored_[buffer].make_wait(main_);
  if (first > 0) loaded_[buffer].make_wait(main_);
  ChunkRows chunk;
  chunk.shape = shape;
  chunk.qkv = buffers_.chunk_qkv;
  chunk.q_norm = w.q_norm;
  chunk.k_norm = w.k_norm;
  chunk.cosine = buffers_.chunk_cosine;
  chunk.sine = buffers_.chunk_sine;
  chunk.queries = buffers_.chunk_queries;
  chunk.last_query = last ? last_query(layer) : nullptr;
  chunk.layer_rows = buffers_.layer_rows[buffer];
  chunk.layer_capacity = limits_.layer_tokens;
  chunk.code_blocks = slots_->device_code_blocks(sequence);
  if (chunk.code_blocks != nullptr && tables_.hashes != nullptr) {
    chunk.hashes = tables_.hashes + int64_t{layer} * shape.num_kv_heads;
  }
  chunk.norm_epsilon = c.rms_norm_eps;
  chunk.layer = layer;
  chunk.first_token = first;
  chunk.rows = rows;
  timed(main_, kCompute, "rotation, rows and codes", layer, [&] { chunk_rows(chunk, stream); });
  computed_[buffer].record(main_);

  if (const int32_t* const pages = slots_->device_pages(sequence); pages != nullptr) {
    computed_[buffer].make_wait(copy_out_);
    MovePages move;
    move.layout = tables_.host;
    move.host_rows = tables_.host_rows;
    move.host_codes = chunk.hashes != nullptr ? tables_.host_codes : nullptr;
    move.pages = pages;
    move.code_blocks = chunk.hashes != nullptr ? chunk.code_blocks : nullptr;
    move.layer_rows = buffers_.layer_rows[buffer];
    move.layer_capacity = limits_.layer_tokens;
    move.first_token = first;
    move.end_token = first + rows;
    move.layer = layer;
    move.num_blocks = kStoreBlocks;
    move.to_host = true;
    timed(copy_out_, kToHost, "rows and codes", layer, [&] { move_pages(move, copy_out_.get()); });
  }

  timed(main_, kCompute, "attention", layer, [&] { chunk_attention(layer, first, rows); });
  StoreChunk store;
  store.shape = shape;
  store.heads = slots_->device_heads(sequence, layer);
  store.layer_rows = buffers_.layer_rows[buffer];
  store.layer_capacity = limits_.layer_tokens;
  store.first_token = first;
  store.rows = rows;
  store.end_token = first + rows;
  store_chunk(store, stream);
  if (last && settles_residents(sequence, rows)) {
    PromptDifficulty difficulty;
    difficulty.tables = tables_;
    difficulty.queries = buffers_.chunk_queries;
    difficulty.misses = difficulty_.as<uint32_t>() + int64_t{layer} * shape.num_kv_heads;
    difficulty.rows = rows;
    difficulty.count = static_cast<int32_t>(SequenceKv::difficulty_samples(rows));
    difficulty.slot = slots_->slot_of(sequence);
    difficulty.layer = layer;
    prompt_difficulty(difficulty, stream);
  }
  if (last && !sequence.is_dense_layer(layer)) {
    PrimeSets prime = prime_params(sequence, layer, first + rows);
    prime.layer_rows = buffers_.layer_rows[buffer];
    prime.layer_capacity = limits_.layer_tokens;
    prime_sets(prime, stream);
    if (sequence.dial() != nullptr) {
      FirstMass mass;
      mass.tables = tables_;
      mass.queries = prime.queries;
      mass.layer_rows = prime.layer_rows;
      mass.layer_capacity = prime.layer_capacity;
      mass.context_tokens = prime.context_tokens;
      mass.samples = first_samples_.as<MassSample>() + int64_t{layer} * shape.num_kv_heads;
      mass.slot = prime.slot;
      mass.layer = layer;
      first_mass(mass, stream);
    }
  }
  if (system_.observer != nullptr) copy_observed(layer, first, rows);
  // The buffer is free when both the copy to the host and this layer's readers are done.
  computed_[buffer].record(main_);
  computed_[buffer].make_wait(copy_out_);
  stored_[buffer].record(copy_out_);

  timed(main_, kCompute, "output and MLP", layer, [&] {
    multiply_add(expanded(w.output, buffers_.expanded), w.output_bias, buffers_.chunk_normed, rows,
                 buffers_.chunk_x);
    norm.weight = w.mlp_norm;
    add_norm(norm, stream);
    mlp_rows(layer, rows);
  });
}

PrimeSets CudaRunner::prime_params(const SequenceKv& sequence, int32_t layer,
                                   int64_t context_tokens) {
  PrimeSets prime;
  prime.tables = tables_;
  prime.scratch = {buffers_.refresh_scratch, buffers_.scratch_bytes};
  prime.queries = last_query(layer);
  prime.context_tokens = context_tokens;
  prime.slot = slots_->slot_of(sequence);
  prime.layer = layer;
  return prime;
}

bool CudaRunner::settles_residents(const SequenceKv& sequence, int64_t rows) {
  return sequence.can_settle_residents() && SequenceKv::difficulty_samples(rows) > 0;
}

// Attention::settle_residents. After the last row of the prompt is written.
void CudaRunner::settle_residents(SequenceKv& sequence, int64_t rows) {
  const KvShape& shape = system_.shape;
  const int64_t count = SequenceKv::difficulty_samples(rows);
  const auto* missed = difficulty_.as<uint32_t>();
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const uint32_t misses = missed[int64_t{layer} * shape.num_kv_heads + h];
      sequence.note_difficulty(layer, h, static_cast<double>(misses) / static_cast<double>(count),
                               count);
    }
  }
  const std::vector<size_t> swapped = sequence.settle_residents();
  if (swapped.empty()) return;
  slots_->upload_heads(sequence);
  // Those that changed places choose their first sets again, so that where a head lies changes no
  // answer.
  int32_t last_primed = -1;
  for (const size_t i : swapped) {
    const auto layer = static_cast<int32_t>(i / static_cast<size_t>(shape.num_kv_heads));
    const auto h = static_cast<int32_t>(i % static_cast<size_t>(shape.num_kv_heads));
    if (sequence.is_dense_layer(layer)) continue;
    if (layer != last_primed) {
      prime_sets(prime_params(sequence, layer, sequence.num_tokens()), main_.get());
      last_primed = layer;
    }
    if (!sequence.is_resident(layer, h)) {
      sequence.counters(layer).rows_primed += first_set_rows(sequence, layer, h);
    }
  }
  main_.synchronize();
  check_fault();
}

int64_t CudaRunner::first_set_rows(SequenceKv& sequence, int32_t layer, int32_t kv_head) const {
  const PolicyOptions& policy = sequence.policy();
  const int64_t context = sequence.num_tokens();
  return std::min({set_size(policy, context), candidates(policy, context).size(),
                   int64_t{sequence.head(layer, kv_head).slot_capacity}});
}

std::span<const float> CudaRunner::prefill(std::span<const int32_t> ids, SequenceKv& sequence,
                                           bool last, const std::function<bool(int32_t)>& proceed,
                                           bool* abandoned) {
  const ModelConfig& c = weights_.config();
  const KvShape& shape = system_.shape;
  const int64_t rows = std::ssize(ids);
  const int64_t first = sequence.num_tokens();
  CLO_CHECK(rows >= 1 && rows <= limits_.chunk_rows, rows, limits_.chunk_rows);
  CLO_CHECK(first + rows <= limits_.layer_tokens, first, rows, limits_.layer_tokens);
  *abandoned = false;
  stop_refreshes();  // priming uses their scratch, and the layers every multiprocessor

  std::memcpy(host_ids_.as<int32_t>(), ids.data(), ids.size_bytes());
  CLO_CUDA(cudaMemcpyAsync(buffers_.ids, host_ids_.as<int32_t>(), ids.size_bytes(),
                           cudaMemcpyHostToDevice, main_.get()));
  BeginChunk begin;
  begin.ids = buffers_.ids;
  begin.table = weights_.embedding().data;
  begin.inverse_frequencies = buffers_.inverse_frequencies;
  begin.x = buffers_.chunk_x;
  begin.cosine = buffers_.chunk_cosine;
  begin.sine = buffers_.chunk_sine;
  begin.attention_factor = static_cast<float>(c.rope.attention_factor);
  begin.first_position = first;
  begin.width = c.hidden_size;
  begin.rows = rows;
  begin.half_dim = static_cast<int32_t>(c.head_dim / 2);
  begin.type = weights_.type();
  begin.blocks = weights_.embedding().blocks;
  begin_chunk(begin, main_.get());

  load_earlier_rows(sequence, 0);
  for (int32_t layer = 0; layer < shape.num_layers && !*abandoned; ++layer) {
    // At most two layers are queued ahead, so that a cancel is heeded within as many.
    if (layer >= kLayerBuffers) {
      layer_done_[static_cast<size_t>(layer - kLayerBuffers)].synchronize();
      if (system_.observer != nullptr) show_observed(layer - kLayerBuffers, first, rows);
    }
    if (proceed && !proceed(std::max(0, layer - kLayerBuffers))) {
      *abandoned = true;
      break;
    }
    if (layer + 1 < shape.num_layers) load_earlier_rows(sequence, layer + 1);
    chunk_layer(sequence, layer, rows, last);
    layer_done_[static_cast<size_t>(layer)].record(main_);
  }
  if (*abandoned) {
    // Rows of a layer that will not be computed may still be on their way into a layer buffer.
    copy_in_.synchronize();
    main_.synchronize();
    copy_out_.synchronize();
    return {};
  }
  if (last) {
    AddNorm norm;
    norm.x = buffers_.chunk_x + (rows - 1) * c.hidden_size;
    norm.weight = weights_.final_norm();
    norm.out = buffers_.normed;
    norm.rows = 1;
    norm.width = c.hidden_size;
    norm.epsilon = c.rms_norm_eps;
    norm.type = weights_.type();
    add_norm(norm, main_.get());
    StepRecorder(*this, 1).head();
    CLO_CUDA(cudaMemcpyAsync(host_logits_.as<float>(), buffers_.logits,
                             static_cast<size_t>(c.vocab_size) * 4, cudaMemcpyDeviceToHost,
                             main_.get()));
  }
  main_.synchronize();
  copy_out_.synchronize();
  check_fault();
  for (int32_t layer = std::max(0, shape.num_layers - kLayerBuffers);
       system_.observer != nullptr && layer < shape.num_layers; ++layer) {
    show_observed(layer, first, rows);
  }
  sequence.advance(rows);
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    KvCounters& counters = sequence.counters(layer);
    if (!sequence.pages().empty()) counters.rows_offloaded += rows * shape.num_kv_heads;
    if (!last || sequence.is_dense_layer(layer)) continue;
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      if (!sequence.is_resident(layer, h)) {
        counters.rows_primed += first_set_rows(sequence, layer, h);
      }
    }
  }
  if (!last) return {};
  sequence.has_last_query = true;
  if (settles_residents(sequence, rows)) settle_residents(sequence, rows);
  find_key_spread(sequence, first + rows);
  if (Dial* const dial = sequence.dial()) {
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      if (sequence.is_dense_layer(layer)) continue;
      for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
        const MassSample& sample =
            first_samples_.as<MassSample>()[int64_t{layer} * shape.num_kv_heads + h];
        if (sample.head >= 0) dial->add_first(sample.kept);
      }
    }
    dial->start();
    sequence.follow_dial();
  }
  return {host_logits_.as<float>(), static_cast<size_t>(c.vocab_size)};
}

}  // namespace clo
