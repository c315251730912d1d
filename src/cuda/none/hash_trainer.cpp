// Stands in for training on the device where the build has no CUDA.
#include "cuda/hash_trainer.h"

#include "device/device_facts.h"

namespace clo {

Result<int64_t> HashTrainer::heads_that_fit(const HashTrainerShape&, int64_t) {
  return std::move(device_facts()).error();
}

Result<std::unique_ptr<HashTrainer>> HashTrainer::create(const HashTrainerShape&, int64_t) {
  return std::move(device_facts()).error();
}

}  // namespace clo
