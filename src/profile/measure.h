#pragma once
// From traces to a profile: every KV head's statistics and, where wanted, its trained projection.
// Heads are worked on side by side, by threads or, for training, on a device; each needs nothing of
// another.
#include <functional>
#include <optional>
#include <span>

#include "base/thread_pool.h"
#include "clo/result.h"
#include "io/rope.h"
#include "profile/device_training.h"
#include "profile/profile.h"
#include "profile/trace.h"
#include "profile/train_hash.h"

namespace clo {

// What a query head's importance is. kNone: the profile has none, so a policy's threshold is the
// same for every head, as it is without a profile.
enum class Importance : uint8_t { kMass, kGates, kNone };

struct MeasureOptions {
  PolicyOptions policy;                  // sink, recent, aggregation, eta, exponent, label age
  std::optional<HashTraining> training;  // absent: no hash weights
  DeviceTraining* device = nullptr;      // trains there, recipe kBoundary alone; null: on the CPU
  Importance importance = Importance::kMass;
  std::vector<float> gates;  // [num_layers, num_kv_heads] of kGates
};

struct MeasureCalls {
  std::function<void(int64_t heads_done, int64_t heads)> on_progress;  // on the calling thread
  std::function<bool()> keep_going;                                    // on any thread
};

// The windows that train and those that are held out to see what training reached: every fourth
// window, or the last of fewer than four; of a single window its runs in the same way; of a single
// run the last quarter of its steps, kMaxLag steps apart from those that train.
struct SampleSplit {
  std::vector<HeadSample> train, held_out;
};
// `windows`: `runs` of each window of the text, one window after another.
SampleSplit split_samples(std::span<const HeadWindow> windows,
                          std::span<const HeadAttention> attention, int64_t runs);

// Requires: traces of `shape` with equally many runs, at least one; where hashes are trained, with
// 16 candidates each. Fails: kCancelled; with a device also as DeviceTraining.
Result<Profile> measure_heads(const KvShape& shape, const RopeConfig& rope,
                              std::span<const WindowTrace> traces, const MeasureOptions& options,
                              ThreadPool& pool, const MeasureCalls& calls);

}  // namespace clo
