#include "engine/backend.h"

#include "base/try.h"
#include "cuda/backend.h"
#include "device/device_facts.h"
#include "engine/memory.h"
#include "reference/cpu_ops.h"

namespace clo {

Status check_device_rows(const KvShape& shape, DType model_type) {
  if (shape.type == model_type) return Ok{};
  return Error{ErrorCode::kUnsupported,
               "the CUDA backend keeps plain KV rows in the model's type alone, " +
                   std::string(dtype_name(model_type)) + "; " + std::string(kv_type_name(shape)) +
                   " was asked for; leave the flag out, say int8 or fp8, or use --backend cpu",
               "--kv-type"};
}

Result<BackendChoice> choose_backend(const ModelConfig& config, const EngineOptions& options) {
  BackendChoice choice;
  if (options.backend != Backend::kCpu) {
    const auto facts = device_facts();
    EngineOptions on_device = options;
    on_device.backend = Backend::kCuda;
    const KvShape shape = kv_shape(config, on_device);
    // A row type that was asked for is named before the type that it makes impossible.
    Status usable =
        facts ? check_device_rows(shape, model_type(config, on_device)) : Status(facts.error());
    if (usable) usable = CudaBackend::supports(shape);
    if (usable) {
      const auto plan = weight_plan(config, on_device);
      if (!plan) usable = plan.error();
    }
    if (usable) {
      choice.backend = Backend::kCuda;
      return choice;
    }
    if (options.backend == Backend::kCuda) return usable.error();
    if (facts) choice.note = facts->name + " is not used: " + usable.error().message;
  }
  EngineOptions on_cpu = options;
  on_cpu.backend = Backend::kCpu;
  const KvShape shape = kv_shape(config, on_cpu);
  CLO_TRY(CpuOps::supports(shape));
  CLO_ASSIGN(const WeightPlan plan, weight_plan(config, on_cpu));
  (void)plan;
  return choice;
}

PolicyOptions for_backend(PolicyOptions policy, Backend backend) {
  const bool asked = policy.predict != Predict::kAuto;
  if (asked && policy.correction == Correction::kAuto) policy.correction = Correction::kNone;
  if (asked) return policy;
  // Nothing runs beside a step of the CPU, so a prediction could hide no transfer there; nor can
  // one help where every true query chooses again. On a GPU a fetch takes longer than a layer and
  // has a whole step to hide in, but a step that looks something up asks for rows that no earlier
  // query foresaw: without the correction answers are lost (docs/measurements).
  const bool never_kept = policy.threshold ? *policy.threshold > 1 : policy.eta > 1;
  const bool foresee = backend == Backend::kCuda && policy.select != Select::kNone && !never_kept;
  policy.predict = foresee ? Predict::kPreviousStep : Predict::kNone;
  if (!foresee) {
    policy.correction = Correction::kNone;  // the true query decides anyway
  } else if (policy.correction == Correction::kAuto) {
    policy.correction = Correction::kTrueQuery;
  }
  return policy;
}

}  // namespace clo
