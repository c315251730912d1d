#pragma once
// One step of training hash projections by the boundary recipe, of many heads at once: five kernels
// in f32. Heads draw alike (same window, same run of keys, same steps), so a step is described once
// and head h's arrays lie at h times a stride. ops/hash_loss.h has the arithmetic, NOTES.md the
// bytes and operations. Every sum has a fixed order: the same inputs give the same weights.
#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/hash_loss.h"

namespace clo::kernels {

struct HashTrainStep {
  int32_t heads = 0;
  int32_t width = 0;     // of a key and of a query: a multiple of 16
  int32_t bits = 0;      // a multiple of 64
  int32_t num_keys = 0;  // of the batch: a multiple of 16, 16 to kMostBatchKeys

  // Of the batch's window. Strides are elements from a head to the next; all 16-byte aligned.
  const float* keys = nullptr;     // [num_keys, width], the first key of the batch
  const float* queries = nullptr;  // [num_steps, width]
  const uint64_t* labels =
      nullptr;  // [num_steps, label_words] bit i: key i of the window is wanted
  int64_t head_keys = 0, head_queries = 0, head_labels = 0;
  int64_t num_steps = 0, label_words = 0;
  int64_t first_key = 0;              // of the window: where the batch's labels begin
  int32_t steps[kBatchQueries] = {};  // of the batch, in [0, num_steps)

  float* weights = nullptr;  // [heads, bits, width]
  float* mean = nullptr;     // [heads, bits, width] of Adam
  float* square = nullptr;   // [heads, bits, width]
  // What passes between the kernels of a step.
  float* codes = nullptr;   // [heads, num_columns, bits]: codes of keys, then
                            // projections of queries
  float* scores = nullptr;  // [heads, kBatchQueries, num_keys]
  AdamStep adam;

  // Keys, then the queries.
  CLO_HOST_DEVICE int64_t num_columns() const { return int64_t{num_keys} + kBatchQueries; }
};

// Relaxed codes of the batch's keys, and projections of its queries, by `weights`.
void hash_train_encode(const HashTrainStep& step, cudaStream_t stream);
// scores: products of a step's projection with every key's code.
void hash_train_score(const HashTrainStep& step, cudaStream_t stream);
// Replaces scores by the slope of the loss at them.
void hash_train_pull(const HashTrainStep& step, cudaStream_t stream);
// Replaces codes by the slope of the loss at the projections: for keys before the relaxed sign.
void hash_train_back(const HashTrainStep& step, cudaStream_t stream);
// The slope at the weights, and Adam's step.
void hash_train_update(const HashTrainStep& step, cudaStream_t stream);

// All of them. Ordered on: `stream`. Fails by CLO_CHECK on sizes out of range.
void hash_train_step(const HashTrainStep& step, cudaStream_t stream);

}  // namespace clo::kernels
