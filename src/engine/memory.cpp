#include "engine/memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "base/check.h"
#include "base/try.h"
#include "model/transformer.h"
#include "model/weights.h"
#include "reference/cpu_ops.h"
#include "reuse/persistent_heads.h"
#include "select/set_rule.h"

namespace clo {

namespace {

// What the process holds beside the arenas: code, libraries, tokenizer (all there by now) and the
// backend's scratch, which grows to this at the first long prompt.
int64_t process_overhead(const ModelConfig& config, const EngineOptions& options,
                         const KvShape& shape, int64_t capacity_tokens, int64_t batch) {
  const auto plan = weight_plan(config, options);
  const bool widens = !plan || !plan->blocks.empty() || plan->type != DType::kF32;
  std::ifstream statm("/proc/self/statm");
  int64_t total_pages = 0, resident_pages = 0;
  statm >> total_pages >> resident_pages;
  // The head's product has a row a sequence, whatever the step.
  const int64_t head_rows = options.max_batch > CpuOps::kSmallRows ? config.vocab_size : 0;
  return resident_pages * sysconf(_SC_PAGESIZE) +
         CpuOps::scratch_bytes_for(shape, std::max(config.intermediate_size * 2, head_rows),
                                   config.hidden_size, max_step_rows(config, options),
                                   capacity_tokens, batch, widens);
}

}  // namespace

int64_t max_context_tokens(const ModelConfig& config, const EngineOptions& options) {
  return options.max_context_tokens > 0 ? std::min(options.max_context_tokens, config.max_positions)
                                        : config.max_positions;
}

int64_t max_step_rows(const ModelConfig& config, const EngineOptions& options) {
  return std::max<int64_t>(
      std::min<int64_t>(options.prefill_chunk, max_context_tokens(config, options)),
      options.max_batch);
}

int32_t resolve_prefill_chunk(const ModelConfig& config, const EngineOptions& options,
                              const KvShape& shape, const CudaBackend* cuda) {
  constexpr int32_t kCpuChunk = 512;
  if (options.prefill_chunk > 0) return options.prefill_chunk;
  if (options.backend != Backend::kCuda) return kCpuChunk;
  const int64_t wanted = max_context_tokens(config, options);
  int64_t budget = options.device_memory_bytes;
  if (budget == 0 && cuda != nullptr) budget = cuda->free_bytes();
  if (budget == 0) return static_cast<int32_t>(wanted);
  const int64_t left = budget - weight_bytes(config, options);
  CudaLimits limits = cuda_limits(config, options);
  return static_cast<int32_t>(
      CudaBackend::largest_chunk(config, shape, limits, wanted, std::max<int64_t>(0, left / 3)));
}

DType model_type(const ModelConfig& config, const EngineOptions& options) {
  switch (options.dtype) {
    case WeightType::kF32:
      return DType::kF32;
    case WeightType::kBF16:
      return DType::kBF16;
    case WeightType::kF16:
      return DType::kF16;
    case WeightType::kAuto:
      break;
  }
  return config.dtype;
}

Result<WeightPlan> weight_plan(const ModelConfig& config, const EngineOptions& options) {
  return plan_weights(config, options.weights, model_type(config, options),
                      options.backend == Backend::kCuda);
}

int64_t weight_bytes(const ModelConfig& config, const EngineOptions& options) {
  const auto plan = weight_plan(config, options);
  CLO_CHECK(plan.has_value());  // choose_backend has asked
  return Weights::required_bytes(config, *plan);
}

CudaLimits cuda_limits(const ModelConfig& config, const EngineOptions& options) {
  CudaLimits limits;
  limits.max_batch = options.max_batch;
  limits.max_context_tokens = max_context_tokens(config, options);
  limits.chunk_rows = std::min<int64_t>(options.prefill_chunk, limits.max_context_tokens);
  const auto plan = weight_plan(config, options);
  limits.tiled_weights = plan && plan->tiled;
  return limits;
}

int64_t step_workspace_bytes(const ModelConfig& config, const EngineOptions& options,
                             const KvShape& shape) {
  if (options.backend == Backend::kCuda) {
    return CudaBackend::workspace_bytes(config, shape, cuda_limits(config, options));
  }
  return Transformer::workspace_bytes(config, max_step_rows(config, options), options.max_batch);
}

KvShape kv_shape(const ModelConfig& config, const EngineOptions& options) {
  KvShape shape;
  shape.num_layers = static_cast<int32_t>(config.num_layers);
  shape.num_q_heads = static_cast<int32_t>(config.num_q_heads);
  shape.num_kv_heads = static_cast<int32_t>(config.num_kv_heads);
  shape.head_dim = static_cast<int32_t>(config.head_dim);
  shape.type = model_type(config, options);
  if (options.kv_type == KvType::kF32) shape.type = DType::kF32;
  if (options.kv_type == KvType::kBF16) shape.type = DType::kBF16;
  if (options.kv_type == KvType::kF16) shape.type = DType::kF16;
  if (options.kv_type == KvType::kInt8) shape.stored = RowFormat::kInt8;
  if (options.kv_type == KvType::kFp8) shape.stored = RowFormat::kFp8;
  shape.code_bits = options.code_bits;
  return shape;
}

PlanInput plan_input(const ModelConfig& config, const EngineOptions& options, const KvShape& shape,
                     const PolicyOptions& policy, int64_t capacity_tokens, int64_t batch) {
  PlanInput input;
  input.shape = shape;
  input.context_tokens = capacity_tokens;
  input.batch = batch;
  input.weight_bytes = weight_bytes(config, options);
  input.workspace_bytes = step_workspace_bytes(config, options, shape);
  input.sink_tokens = policy.sink;
  input.ring_tokens = ring_tokens(policy);
  input.slot_capacity = slot_capacity(policy, capacity_tokens);
  input.num_dense_heads = num_dense_heads(policy, shape);
  input.num_persistent_heads = num_fixed_persistent_heads(policy, shape);
  input.fill_budget = policy.persistent == PolicyOptions::Persistent::kFillBudget &&
                      policy.select != Select::kNone && options.device_memory_bytes > 0;
  input.host_copy = options.keep_prefixes;
  // A GPU makes the codes of shared pages on the device; see KvSystem::codes_pass_device.
  input.device_codes =
      reads_codes(policy, shape) || (options.backend == Backend::kCuda && options.keep_prefixes);
  input.device_budget_bytes = options.device_memory_bytes;
  input.host_budget_bytes = options.host_memory_bytes;
  input.process_overhead_bytes = process_overhead(config, options, shape, capacity_tokens, batch);
  return input;
}

Result<PlanInput> plan_input(const ModelConfig& config, const EngineOptions& options) {
  const KvShape shape = kv_shape(config, options);
  return plan_input(config, options, shape, options.policy, max_context_tokens(config, options),
                    options.max_batch);
}

}  // namespace clo
