// Stands in for device_facts.cpp where the build has no CUDA.
#include "device/device_facts.h"

namespace clo {

Result<DeviceFacts> device_facts() {
  return Error{ErrorCode::kDeviceFault,
               "this build has no CUDA backend: it was configured without a CUDA toolkit (12.8 or "
               "newer); install one and configure again, or use --backend cpu",
               "--backend"};
}

int64_t driver_used_bytes() { return -1; }
int64_t driver_used_at_start() { return -1; }

}  // namespace clo
