#pragma once
// Trained projections of many heads at once on a device: recipe kBoundary, the same draws and the
// same arithmetic as train_hash() on the CPU but for the order of sums. Heads that were recorded
// together draw alike, so one launch serves all of them.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "clo/result.h"
#include "profile/train_hash.h"

namespace clo {

// A head to train: its samples, and where it sets out from [head_dim + 1, bits].
struct TrainingHead {
  std::span<const HeadSample> samples;
  std::span<const float> start;
};

class DeviceTraining {
 public:
  // device_memory_bytes: what training may take; 0: what is free. Fails: as device_facts().
  static Result<DeviceTraining> create(int64_t device_memory_bytes);

  const std::string& device_name() const { return device_name_; }

  // How many heads like one with these samples can be trained at once. Fails: kDeviceMemory when
  // not even one can.
  Result<int64_t> heads_at_once(const HeadShape& shape, std::span<const HeadSample> samples,
                                const PolicyOptions& policy, int32_t bits) const;

  // As train_hash() for each head, all of them at once. `pool` makes the inputs ready. The same
  // inputs give the same weights on the same device. Requires: recipe kBoundary; samples of the
  // same steps and window sizes in all heads, as train_hash() wants them.
  // Fails: kDeviceMemory, kDeviceFault.
  Result<std::vector<std::vector<float>>> train(const HeadShape& shape,
                                                std::span<const TrainingHead> heads,
                                                const PolicyOptions& policy,
                                                const HashTraining& training, ThreadPool& pool);

  // Of all calls: seconds that inputs took to make ready and to copy, and seconds of steps.
  double load_seconds() const { return load_seconds_; }
  double step_seconds() const { return step_seconds_; }
  // The most device memory that arrays of one call took, and the most that the driver counted
  // beyond what it counted before this process opened the device (-1: unknown).
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t peak_driver_bytes() const { return peak_driver_bytes_; }

 private:
  DeviceTraining(std::string device_name, int64_t limit_bytes)
      : device_name_(std::move(device_name)), limit_bytes_(limit_bytes) {}

  std::string device_name_;
  int64_t limit_bytes_;
  double load_seconds_ = 0, step_seconds_ = 0;
  int64_t peak_bytes_ = 0, peak_driver_bytes_ = -1;
};

}  // namespace clo
