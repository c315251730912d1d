#include "profile/device_training.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "base/check.h"
#include "base/try.h"
#include "cuda/hash_trainer.h"
#include "device/device_facts.h"
#include "profile/boundary_inputs.h"
#include "select/set_rule.h"
#include "tensor/dtype.h"

namespace clo {

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Steps that may be queued before the host waits: so soon does an interrupt take effect.
constexpr int32_t kQueuedSteps = 64;

HashTrainerShape trainer_shape(const HeadShape& shape, std::span<const HeadSample> samples,
                               const PolicyOptions& policy, int32_t bits) {
  HashTrainerShape made{static_cast<int32_t>(training::input_width(shape)), bits, {}};
  for (const HeadSample& sample : samples) {
    made.windows.push_back({training::num_training_keys(sample, policy), sample.window.num_steps});
  }
  return made;
}

}  // namespace

Result<DeviceTraining> DeviceTraining::create(int64_t device_memory_bytes) {
  CLO_ASSIGN(const DeviceFacts facts, device_facts());
  return DeviceTraining(facts.name, device_memory_bytes);
}

Result<int64_t> DeviceTraining::heads_at_once(const HeadShape& shape,
                                              std::span<const HeadSample> samples,
                                              const PolicyOptions& policy, int32_t bits) const {
  return HashTrainer::heads_that_fit(trainer_shape(shape, samples, policy, bits), limit_bytes_);
}

Result<std::vector<std::vector<float>>> DeviceTraining::train(const HeadShape& shape,
                                                              std::span<const TrainingHead> heads,
                                                              const PolicyOptions& policy,
                                                              const HashTraining& training,
                                                              ThreadPool& pool) {
  CLO_CHECK(training.recipe == HashRecipe::kBoundary);
  CLO_CHECK(!heads.empty());
  const int64_t bits = training.bits;
  const std::span<const HeadSample> first = heads[0].samples;
  const HashTrainerShape sizes = trainer_shape(shape, first, policy, training.bits);
  for (const TrainingHead& head : heads) {
    CLO_CHECK(trainer_shape(shape, head.samples, policy, training.bits) == sizes);
    for (size_t w = 0; w < first.size(); ++w) {
      CLO_CHECK(head.samples[w].first_step == first[w].first_step &&
                    head.samples[w].end_step == first[w].end_step,
                w);
    }
  }
  try {
    Clock::time_point begun = Clock::now();
    training::BatchDraws draws(first, policy, training.seed);
    CLO_ASSIGN(const std::unique_ptr<HashTrainer> trainer,
               HashTrainer::create(sizes, std::ssize(heads)));
    // As many heads are made ready at a time as there are threads, which bounds the copies.
    std::vector<std::vector<training::PreparedWindow>> ready(
        static_cast<size_t>(pool.num_threads()));
    std::vector<float> scales(heads.size());
    for (int64_t from = 0; from < std::ssize(heads); from += std::ssize(ready)) {
      const int64_t count = std::min(std::ssize(ready), std::ssize(heads) - from);
      pool.run(count, [&](int64_t i, int) {
        const TrainingHead& head = heads[static_cast<size_t>(from + i)];
        std::vector<training::PreparedWindow>& windows = ready[static_cast<size_t>(i)];
        windows.clear();
        const float scale = scales[static_cast<size_t>(from + i)] =
            training::key_scale(shape, head.samples, draws);
        for (size_t w = 0; w < head.samples.size(); ++w) {
          windows.push_back(
              training::prepare_window(shape, head.samples[w], draws.tokens(w), scale));
        }
      });
      for (int64_t i = 0; i < count; ++i) {
        for (size_t w = 0; w < first.size(); ++w) {
          const training::PreparedWindow& made = ready[static_cast<size_t>(i)][w];
          trainer->load(from + i, w, made.keys, made.queries, made.labels);
        }
        trainer->start(from + i, training::start_rows(
                                     shape, heads[static_cast<size_t>(from + i)].start, bits));
      }
    }
    trainer->wait();
    load_seconds_ += seconds_since(begun);
    peak_bytes_ = std::max(peak_bytes_, trainer->num_bytes());
    if (const int64_t used = driver_used_bytes(); used >= 0 && driver_used_at_start() >= 0) {
      peak_driver_bytes_ = std::max(peak_driver_bytes_, used - driver_used_at_start());
    }

    begun = Clock::now();
    AdamStep step;
    for (int32_t i = 0; i < training.iterations; ++i) {
      if (training.keep_going && !training.keep_going()) break;
      const training::Batch batch = draws.next();
      step = adam_step(step, i, training.iterations);
      trainer->step({batch.window, batch.first_key, batch.num_keys, batch.steps}, step);
      if (i % kQueuedSteps == kQueuedSteps - 1) trainer->wait();
    }
    trainer->wait();
    step_seconds_ += seconds_since(begun);
    std::vector<std::vector<float>> trained;
    for (int64_t head = 0; head < std::ssize(heads); ++head) {
      trained.push_back(training::as_columns(shape, trainer->weights(head), bits,
                                             scales[static_cast<size_t>(head)]));
      for (float& w : trained.back()) w = bf16_to_f32(f32_to_bf16(w));
    }
    return trained;
  } catch (const std::runtime_error& error) {
    // What a device call throws; see device/cuda_error.h.
    return Error{ErrorCode::kDeviceFault, error.what(), "training on the device"};
  }
}

}  // namespace clo
