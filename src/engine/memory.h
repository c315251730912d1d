#pragma once
// The memory plan of an engine that has not been loaded: what `clo inspect` prints and what
// Engine::load works from.
#include "clo/engine.h"
#include "cuda/backend.h"
#include "io/model_config.h"
#include "kv/memory_plan.h"
#include "model/weights.h"

namespace clo {

// --dtype, or what the files hold: the type of products and plain weights, and of rows where
// --kv-type does not say otherwise.
DType model_type(const ModelConfig& config, const EngineOptions& options);

// Shape of the KV rows under these options; whether a backend takes it is choose_backend's
// question.
KvShape kv_shape(const ModelConfig& config, const EngineOptions& options);

// In what follows options.backend has been chosen (choose_backend) and options.prefill_chunk
// resolved.

// Prompt tokens of a prefill step when the options leave it open: what keeps the CPU's caches warm;
// on a GPU the whole prompt, as long as its workspace leaves most of the budget to the cache.
// `cuda` may be null: then what is free is not known and the whole context is taken.
int32_t resolve_prefill_chunk(const ModelConfig& config, const EngineOptions& options,
                              const KvShape& shape, const CudaBackend* cuda);
CudaLimits cuda_limits(const ModelConfig& config, const EngineOptions& options);
// What the backend's steps take from the device arena.
int64_t step_workspace_bytes(const ModelConfig& config, const EngineOptions& options,
                             const KvShape& shape);

// Plan of options.max_batch sequences of the longest context under options.policy.
Result<PlanInput> plan_input(const ModelConfig& config, const EngineOptions& options);

// The same for any policy, length and batch. Requires: shape = kv_shape(config, options).
PlanInput plan_input(const ModelConfig& config, const EngineOptions& options, const KvShape& shape,
                     const PolicyOptions& policy, int64_t capacity_tokens, int64_t batch);

// How the backend keeps the weights. Fails: as plan_weights().
Result<WeightPlan> weight_plan(const ModelConfig& config, const EngineOptions& options);
int64_t weight_bytes(const ModelConfig& config, const EngineOptions& options);

// The most tokens a step computes: a prefill chunk or a decode batch.
int64_t max_step_rows(const ModelConfig& config, const EngineOptions& options);
int64_t max_context_tokens(const ModelConfig& config, const EngineOptions& options);

}  // namespace clo
