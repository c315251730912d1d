#pragma once
// Trains hash projections of many heads at once on the device, by the boundary recipe: owns what
// the kernels of kernels/train/ work on, and queues their steps. Who draws batches and makes the
// inputs ready is profile/. No CUDA type here: none/ answers where the build has no CUDA. One
// thread.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "clo/result.h"
#include "ops/hash_loss.h"

namespace clo {

// What all heads share.
struct HashTrainerShape {
  struct Window {
    int64_t num_keys = 0, num_steps = 0;
    bool operator==(const Window&) const = default;
  };
  int32_t width = 0;  // of a key and of a query: a multiple of 16
  int32_t bits = 0;   // a multiple of 64
  std::vector<Window> windows;

  bool operator==(const HashTrainerShape&) const = default;
};

// Where a head's windows lie, in elements from its first, and what a head takes. Pure.
struct HashTrainerPlan {
  std::vector<int64_t> keys, queries, labels;  // of each window
  int64_t head_keys = 0, head_queries = 0, head_labels = 0;
  int64_t most_keys = 0;  // of a batch
  int64_t head_codes = 0, head_scores = 0, head_weights = 0;
  int64_t head_bytes = 0;
};
HashTrainerPlan plan_hash_trainer(const HashTrainerShape& shape);

// A step's sample, of every head: a run of a window's keys and some of its steps.
struct HashBatch {
  size_t window = 0;
  int64_t first_key = 0, num_keys = 0;  // num_keys: a multiple of 16, to kMostBatchKeys
  std::array<int64_t, kBatchQueries> steps = {};
};

class HashTrainer {
 public:
  // How many heads fit in `limit_bytes`, or in nine tenths of the free device memory where that is
  // 0 or more than these. Fails: kDeviceMemory when not even one does, as device_facts().
  static Result<int64_t> heads_that_fit(const HashTrainerShape& shape, int64_t limit_bytes);
  // Fails: kDeviceMemory, as device_facts().
  static Result<std::unique_ptr<HashTrainer>> create(const HashTrainerShape& shape, int64_t heads);
  virtual ~HashTrainer() = default;

  // Of one head: keys [num_keys, width], queries [num_steps, width], and labels
  // [num_steps, words of 64 keys] whose bit i says that key i is in the exact set. Blocks: until
  // they have been copied; start() too.
  virtual void load(int64_t head, size_t window, std::span<const float> keys,
                    std::span<const float> queries, std::span<const uint64_t> labels) = 0;
  // Where a head sets out from: weights [bits, width].
  virtual void start(int64_t head, std::span<const float> weights) = 0;
  // Queues one step of all heads. Requires: every head loaded and started.
  virtual void step(const HashBatch& batch, const AdamStep& adam) = 0;
  // Blocks: until every step queued has been done.
  virtual void wait() = 0;
  // [bits, width]. Blocks: as wait().
  virtual std::vector<float> weights(int64_t head) = 0;
  // Device memory that it holds.
  virtual int64_t num_bytes() const = 0;
};

}  // namespace clo
