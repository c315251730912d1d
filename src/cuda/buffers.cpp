#include "cuda/buffers.h"

#include <algorithm>
#include <bit>

#include "base/try.h"
#include "base/units.h"
#include "device/device_facts.h"
#include "kernels/attend/attend.h"
#include "kernels/refresh/refresh.h"
#include "kernels/sample/sample.h"
#include "select/hash_signs.h"

namespace clo {

DeviceNumbers device_numbers() {
  const auto facts = device_facts();
  if (!facts) return {};
  return {facts->num_multiprocessors, facts->shared_bytes_per_block};
}

kernels::SkinnyPlan plan_product(WeightBlocks blocks, int64_t num_outputs, int64_t num_inputs,
                                 const DeviceNumbers& device, int32_t max_splits) {
  if (blocks == WeightBlocks::kNone) {
    return kernels::plan_skinny_linear(num_outputs, num_inputs, kernels::kSkinnyRows,
                                       device.num_multiprocessors, device.shared_bytes, max_splits);
  }
  return kernels::plan_tiled_linear(blocks, num_outputs, num_inputs, kernels::kSkinnyRows,
                                    device.num_multiprocessors, device.shared_bytes, max_splits);
}

int32_t refresh_clusters(const CudaLimits& limits, bool many_jobs, int32_t num_multiprocessors) {
  // With few jobs a step waits for its products, which need multiprocessors without neighbours: 32
  // clusters made a step of 16 sequences that all hit 1.7 times as long. With many it waits for
  // rows, and more clusters hide more choosing (measured on an H200: docs/measurements.md).
  constexpr int32_t kFew = 24, kMany = 32;
  const int32_t wanted =
      limits.queue_clusters > 0 ? limits.queue_clusters : (many_jobs ? kMany : kFew);
  // Below sm_90 a cluster is one block, and attention may need the other multiprocessors for
  // itself.
  const int32_t most = num_multiprocessors / kernels::kClusterBlocks;
  return std::clamp(wanted, 1, std::max(most, 1));
}

int64_t layer_tokens(const CudaLimits& limits) {
  return limits.layer_tokens > 0 ? limits.layer_tokens : limits.max_context_tokens;
}

Status take_buffers(const BufferSizes& sizes, StepBuffers& b, const TakeBuffer& take_bytes) {
  const ModelConfig& c = sizes.config;
  const KvShape& shape = sizes.shape;
  const int64_t rows = sizes.limits.max_batch;
  const int64_t q = c.num_q_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  const int64_t half = c.head_dim / 2;
  const int64_t heads = int64_t{shape.num_layers} * shape.num_kv_heads;
  // The libraries ask for 256-byte alignment, more than the arena gives.
  constexpr int64_t kAlign = 256;
  const auto take = [&]<typename T>(T*& target, int64_t count, int64_t bytes_each) -> Status {
    void* block = nullptr;
    CLO_TRY(take_bytes(&block, std::max<int64_t>(count, 1) * bytes_each + kAlign));
    const auto address = reinterpret_cast<uintptr_t>(block);
    target = reinterpret_cast<T*>((address + kAlign - 1) / kAlign * kAlign);
    return Ok{};
  };
  const auto floats = [&](float*& target, int64_t count) { return take(target, count, 4); };
  const auto halves = [&](void*& target, int64_t count) { return take(target, count, 2); };

  CLO_TRY(floats(b.x, rows * c.hidden_size));
  CLO_TRY(halves(b.normed, rows * c.hidden_size));
  CLO_TRY(halves(b.predicted_normed, rows * c.hidden_size));
  // Elements of a row's parts, in whichever form a layer's matrix lies.
  const auto parts = [&](int64_t outputs, int64_t inputs) {
    int64_t most = 0;
    for (const WeightBlocks blocks :
         {WeightBlocks::kNone, WeightBlocks::kInt8, WeightBlocks::kQ4}) {
      if (blocks != WeightBlocks::kNone &&
          (!sizes.limits.tiled_weights || inputs % kBlockInputs != 0)) {
        continue;
      }
      most = std::max<int64_t>(most, plan_product(blocks, outputs, inputs, sizes.device).splits);
    }
    return most * outputs;
  };
  const int64_t most_parts = std::max({parts(q + 2 * kv, c.hidden_size), parts(c.hidden_size, q),
                                       parts(2 * c.intermediate_size, c.hidden_size),
                                       parts(c.hidden_size, c.intermediate_size)});
  CLO_TRY(floats(b.parts, rows * most_parts));
  CLO_TRY(floats(b.predicted_parts, rows * parts(q, c.hidden_size)));
  CLO_TRY(floats(b.queries, rows * q));
  CLO_TRY(floats(b.predicted, rows * q));
  CLO_TRY(halves(b.attended, rows * q));
  CLO_TRY(halves(b.inner, rows * c.intermediate_size));
  CLO_TRY(floats(b.cosine, rows * half));
  CLO_TRY(floats(b.sine, rows * half));
  CLO_TRY(floats(b.logits, rows * c.vocab_size));
  const int32_t grid = kernels::attend_grid(shape, sizes.device.num_multiprocessors);
  CLO_TRY(floats(b.attend_parts,
                 kernels::attend_parts(grid, static_cast<int32_t>(rows), shape.num_kv_heads) *
                     shape.group_size() * (shape.head_dim + 2)));
  CLO_TRY(floats(b.log_sum_exp, int64_t{shape.num_layers} * rows * shape.num_q_heads));
  CLO_TRY(take(b.arrivals, rows * shape.num_kv_heads, 4));
  CLO_TRY(take(b.sample_scratch,
               kernels::sample_scratch_bytes(static_cast<int32_t>(rows), c.vocab_size), 1));
  b.scratch_bytes =
      round_up(kernels::refresh_scratch_bytes(sizes.limits.max_context_tokens), Arena::kAlignment);
  CLO_TRY(take(b.refresh_scratch,
               std::max(refresh_clusters(sizes.limits, true, sizes.device.num_multiprocessors),
                        shape.num_kv_heads),
               b.scratch_bytes));

  CLO_TRY(floats(b.inverse_frequencies, half));
  if (shape.code_bits > 0) {
    const int64_t width = hash_width(shape.head_dim);
    CLO_TRY(take(b.signs, heads * divide_up(shape.code_bits, width) * 2 * (width / 32), 4));
    CLO_TRY(take(b.hashes, heads, sizeof(HashParams)));
    if (sizes.trained_hashes) {
      CLO_TRY(floats(b.hash_weights, heads * hash_weight_count(shape.head_dim, shape.code_bits)));
    }
  }

  if (c.attention_bias) CLO_TRY(halves(b.qkv_bias, c.num_layers * (q + 2 * kv)));
  if (c.mlp_bias) CLO_TRY(halves(b.gate_up_bias, c.num_layers * 2 * c.intermediate_size));

  CLO_TRY(take(b.slots, rows, sizeof(kernels::BatchSlot)));
  CLO_TRY(take(b.row_slot, rows, 4));
  CLO_TRY(take(b.heads, rows * heads, sizeof(HeadCacheView)));
  CLO_TRY(take(b.rules, rows * heads, sizeof(kernels::HeadRule)));
  CLO_TRY(take(b.pending, rows * heads, 4));
  CLO_TRY(take(b.counters, rows * shape.num_layers, sizeof(kernels::DeviceCounters)));
  CLO_TRY(take(b.decided, rows * heads, 4));
  CLO_TRY(take(b.entropies, rows * heads, sizeof(kernels::HeadEntropy)));
  CLO_TRY(floats(b.kept_queries, 2 * rows * shape.num_layers * q));
  b.max_pages = divide_up(sizes.limits.max_context_tokens, kPageTokens);
  CLO_TRY(take(b.pages, rows * b.max_pages, 4));
  CLO_TRY(take(b.code_blocks, rows * b.max_pages, 8));
  CLO_TRY(take(b.answers, rows * sizes.limits.max_context_tokens, 4));
  CLO_TRY(take(b.answer_of, rows, 8));
  b.watched_words = divide_up(sizes.limits.max_context_tokens, 32);
  CLO_TRY(take(b.watched, rows * b.watched_words, 4));
  CLO_TRY(take(b.queue, 1, sizeof(kernels::RefreshQueue)));
  // Each head has at most one job waiting.
  b.queue_capacity = std::bit_ceil(static_cast<uint32_t>(rows * heads));
  CLO_TRY(
      take(b.jobs, kernels::kNumRings * int64_t{b.queue_capacity}, sizeof(kernels::RefreshJob)));

  const int64_t chunk = sizes.limits.chunk_rows;
  const int64_t mlp = std::min(chunk, kMlpRows);
  CLO_TRY(take(b.ids, chunk, 4));
  CLO_TRY(floats(b.chunk_x, chunk * c.hidden_size));
  CLO_TRY(halves(b.chunk_normed, chunk * std::max(c.hidden_size, q)));
  CLO_TRY(halves(b.chunk_qkv, chunk * (q + 2 * kv)));
  CLO_TRY(halves(b.chunk_queries, chunk * q));
  CLO_TRY(halves(b.chunk_gate_up, mlp * 2 * c.intermediate_size));
  CLO_TRY(halves(b.chunk_inner, mlp * c.intermediate_size));
  if (sizes.limits.tiled_weights) {
    const int64_t largest = std::max(q + 2 * kv, 2 * c.intermediate_size);
    CLO_TRY(halves(b.expanded, std::max(largest, q) * c.hidden_size));
    CLO_TRY(halves(b.expanded_down, c.hidden_size * c.intermediate_size));
  }
  CLO_TRY(floats(b.chunk_cosine, chunk * half));
  CLO_TRY(floats(b.chunk_sine, chunk * half));
  CLO_TRY(floats(b.chunk_query, shape.num_layers * q));
  for (std::byte*& buffer : b.layer_rows) {
    CLO_TRY(take(buffer, shape.num_kv_heads * layer_tokens(sizes.limits), shape.row_bytes()));
  }
  CLO_TRY(take(b.matmul_workspace, 1, kMatmulWorkspace));
  CLO_TRY(take(b.sdpa_workspace, 1, kSdpaWorkspace));
  return Ok{};
}

}  // namespace clo
