#include "engine/backend.h"

#include "base/try.h"
#include "cuda/backend.h"
#include "device/device_facts.h"
#include "reference/cpu_ops.h"

namespace clo {

Result<BackendChoice> choose_backend(const EngineOptions& options, const KvShape& shape) {
  BackendChoice choice;
  if (options.backend == Backend::kCuda) {
    CLO_ASSIGN(const DeviceFacts facts, device_facts());
    CLO_TRY(CudaBackend::supports(shape));
    choice.backend = Backend::kCuda;
    return choice;
  }
  if (options.backend == Backend::kAuto) {
    if (const auto facts = device_facts(); facts) {
      const Status supported = CudaBackend::supports(shape);
      if (supported) {
        choice.backend = Backend::kCuda;
        return choice;
      }
      choice.note = facts->name + " is not used: " + supported.error().message;
    }
  }
  CLO_TRY(CpuOps::supports(shape));
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
