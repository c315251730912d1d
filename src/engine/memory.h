#pragma once
// The memory plan of an engine that has not been loaded: what `clo inspect` prints and what
// Engine::load works from.
#include "clo/engine.h"
#include "io/model_config.h"
#include "kv/memory_plan.h"

namespace clo {

// Shape of the KV rows under these options. Fails: kUnsupported, see CpuOps::supports.
Result<KvShape> kv_shape(const ModelConfig& config, const EngineOptions& options);

// Plan of options.max_batch sequences of the longest context under options.policy.
Result<PlanInput> plan_input(const ModelConfig& config, const EngineOptions& options);

// The same for any policy, length and batch. Requires: shape = kv_shape(config, options).
PlanInput plan_input(const ModelConfig& config, const EngineOptions& options, const KvShape& shape,
                     const PolicyOptions& policy, int64_t capacity_tokens, int64_t batch);

// The most tokens a step computes: a prefill chunk or a decode batch.
int64_t max_step_rows(const ModelConfig& config, const EngineOptions& options);
int64_t max_context_tokens(const ModelConfig& config, const EngineOptions& options);

}  // namespace clo
