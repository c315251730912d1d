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

}  // namespace clo
