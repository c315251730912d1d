#pragma once
// What the first CUDA device is and what it lacks, for `clo inspect` and for the choice of a
// backend. No CUDA type here: device/none/ answers where the build has no CUDA.
#include <cstdint>
#include <string>
#include <vector>

#include "clo/result.h"

namespace clo {

struct DeviceFeature {
  std::string name;
  bool present = false;
  std::string reason;  // why it is absent, or what it is used for
};

struct DeviceFacts {
  std::string name;
  int32_t capability_major = 0, capability_minor = 0;
  int32_t num_multiprocessors = 0;
  int64_t memory_bytes = 0;       // in all
  int64_t free_memory_bytes = 0;  // now
  int64_t shared_bytes_per_block = 0;
  int32_t driver_version = 0, runtime_version = 0;  // 1000 * major + 10 * minor
  std::vector<DeviceFeature> features;
};

// Fails: kDeviceFault when the build has no CUDA, there is no driver or device, the driver is too
// old for the runtime, or the capability is below 8.0. Each message says which.
Result<DeviceFacts> device_facts();

// Bytes of device memory in use by all processes, as the driver's management library counts them;
// -1 where it cannot be asked. What a budget is proved with.
int64_t driver_used_bytes();
// The same before this process opened the device: noted by the first device_facts().
int64_t driver_used_at_start();

}  // namespace clo
