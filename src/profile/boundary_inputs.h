#pragma once
// What a step of the boundary recipe works on: the keys of a window in random order, and which of
// them and which queries each step takes. Both trainers draw the same. Inside this room only.
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "profile/train_hash.h"
#include "profile/training_parts.h"

namespace clo::training {

// Keys of a run that train: a random sample of its candidates, so that inputs stay small however
// long the window is. Runs are many, and each has a sample of its own.
inline constexpr int64_t kMostRunKeys = 4 * kMostKeys;
int64_t num_training_keys(const HeadSample& sample, const PolicyOptions& policy);

// One step's sample of a window.
struct Batch {
  size_t window = 0;
  int64_t first_key = 0, num_keys = 0;       // of the window's keys in their random order
  std::array<int64_t, kQueries> steps = {};  // of the window
};

// Draws by the sizes of the windows and a seed alone, so heads that were recorded together draw
// alike. The windows' keys are put in order first, then batches follow without end.
class BatchDraws {
 public:
  // Requires: samples with steps and 16 candidates at the first of them.
  BatchDraws(std::span<const HeadSample> samples, const PolicyOptions& policy, uint64_t seed);
  // num_training_keys() candidates of the first step in random order: any stretch is a sample.
  std::span<const int32_t> tokens(size_t window) const { return windows_[window].tokens; }
  Batch next();

 private:
  struct Window {
    std::vector<int32_t> tokens;
    int64_t first_step = 0, end_step = 0;
  };
  Random random_;
  std::vector<Window> windows_;
};

// A row that trains: head_dim values, and behind them what a key's bias is learned from, a
// constant. Products want multiples of 16; the rest is 0, and so is all of it in a query.
inline constexpr int64_t kBiasInputs = 16;
inline constexpr float kBiasInput =
    4;  // the larger, the faster a bias moves: little came of 1 to 4
inline int64_t input_width(const HeadShape& shape) { return shape.head_dim + kBiasInputs; }

// What gives a head's keys a mean length of sqrt(head_dim), over all that train.
float key_scale(const HeadShape& shape, std::span<const HeadSample> samples,
                const BatchDraws& draws);

// A window of one head, made ready. A step's query is the sum of the group's, of length
// sqrt(head_dim): weights of bits are relative, so its own length says nothing. A key's does.
struct PreparedWindow {
  int64_t count = 0;             // keys
  int64_t label_words = 0;       // of a step
  std::vector<float> keys;       // [count, input_width] in the order drawn
  std::vector<float> queries;    // [num_steps, input_width]
  std::vector<uint64_t> labels;  // [num_steps, label_words] bit i: key i is in the exact set

  bool wanted(int64_t step, int64_t key) const {
    return ((labels[static_cast<size_t>(step * label_words + key / 64)] >> (key % 64)) & 1u) != 0;
  }
};
PreparedWindow prepare_window(const HeadShape& shape, const HeadSample& sample,
                              std::span<const int32_t> tokens, float scale);

// Where training sets out from: `start` [head_dim + 1, bits] as [bits, input_width], rows of length
// 1. Requires: no bias in it.
std::vector<float> start_rows(const HeadShape& shape, std::span<const float> start, int64_t bits);
// Back to [head_dim + 1, bits], for keys and queries as they are. `scale`: key_scale().
std::vector<float> as_columns(const HeadShape& shape, std::span<const float> rows, int64_t bits,
                              float scale);

// kBoundary on this processor; [head_dim + 1, bits], not rounded yet.
std::vector<float> train_boundary(const HeadShape& shape, std::span<const HeadSample> samples,
                                  const PolicyOptions& policy, std::span<const float> start,
                                  const HashTraining& training);

}  // namespace clo::training
