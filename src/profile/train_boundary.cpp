#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "profile/boundary_inputs.h"
#include "profile/matrix.h"

namespace clo::training {

namespace {

// One step's matrices: bits x keys and the like, all kept between steps.
class Trainer {
 public:
  Trainer(int64_t input_width, int32_t num_bits) : width(input_width), bits(num_bits) {}

  int64_t width, bits;
  int64_t num_keys = 0;
  std::vector<float> key_columns;  // [width, keys]
  std::vector<float> key_rows;     // [keys, width]
  std::vector<float> query_rows;   // [kQueries, width]
  std::vector<float> label;        // [kQueries, keys]: 1 in the exact set, else 0
  std::vector<float> key_codes;    // [bits, keys] relaxed
  std::vector<float> projections;  // [kQueries, bits] of queries
  std::vector<float> scores;       // [kQueries, keys]
  std::vector<float> gradient;     // [bits, width]

  void load(const PreparedWindow& made, const std::vector<float>& columns, const Batch& batch);
  void forward(const std::vector<float>& weights);
  void backward();

 private:
  std::vector<float> projection_columns_;  // [bits, kQueries]
  std::vector<float> score_rows_;          // [keys, kQueries]
  std::vector<float> from_keys_, from_queries_, part_;
};

void Trainer::load(const PreparedWindow& made, const std::vector<float>& columns,
                   const Batch& batch) {
  num_keys = batch.num_keys;
  const int64_t first = batch.first_key;
  key_rows.assign(made.keys.begin() + first * width,
                  made.keys.begin() + (first + num_keys) * width);
  key_columns.resize(static_cast<size_t>(width * num_keys));
  for (int64_t d = 0; d < width; ++d) {
    std::copy_n(columns.data() + d * made.count + first, num_keys,
                key_columns.data() + d * num_keys);
  }
  query_rows.resize(static_cast<size_t>(kQueries * width));
  label.resize(static_cast<size_t>(kQueries * num_keys));
  for (int64_t q = 0; q < kQueries; ++q) {
    const int64_t step = batch.steps[static_cast<size_t>(q)];
    std::copy_n(made.queries.data() + step * width, width, query_rows.data() + q * width);
    for (int64_t i = 0; i < num_keys; ++i) {
      label[q * num_keys + i] = made.wanted(step, first + i) ? 1.0f : 0.0f;
    }
  }
}

void Trainer::forward(const std::vector<float>& weights) {
  key_codes.resize(static_cast<size_t>(bits * num_keys));
  multiply(weights.data(), key_columns.data(), key_codes.data(), bits, width, num_keys);
  relax(key_codes, 1);
  part_.resize(static_cast<size_t>(width * kQueries));
  transpose(query_rows.data(), kQueries, width, part_.data(), kQueries);
  projection_columns_.resize(static_cast<size_t>(bits * kQueries));
  multiply(weights.data(), part_.data(), projection_columns_.data(), bits, width, kQueries);
  projections.resize(projection_columns_.size());
  transpose(projection_columns_.data(), bits, kQueries, projections.data(), bits);
  scores.resize(static_cast<size_t>(kQueries * num_keys));
  multiply(projections.data(), key_codes.data(), scores.data(), kQueries, bits, num_keys);
}

// From the slope of the loss at each score, which stands in `scores`, to that at each weight.
void Trainer::backward() {
  from_keys_.resize(key_codes.size());
  multiply(projection_columns_.data(), scores.data(), from_keys_.data(), bits, kQueries, num_keys);
  for (size_t i = 0; i < from_keys_.size(); ++i) from_keys_[i] *= relaxed_slope(key_codes[i]);
  gradient.resize(static_cast<size_t>(bits * width));
  multiply(from_keys_.data(), key_rows.data(), gradient.data(), bits, num_keys, width);

  score_rows_.resize(scores.size());
  transpose(scores.data(), kQueries, num_keys, score_rows_.data(), kQueries);
  from_queries_.resize(static_cast<size_t>(bits * kQueries));
  multiply(key_codes.data(), score_rows_.data(), from_queries_.data(), bits, num_keys, kQueries);
  part_.resize(static_cast<size_t>(bits * width));
  multiply(from_queries_.data(), query_rows.data(), part_.data(), bits, kQueries, width);
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += part_[i];
}

// Replaces each query's scores by the slope of its loss. The boundary lies at the score of rank
// (keys that are in the exact set); a key on the wrong side of it costs by how far.
void boundary_loss(Trainer& t, std::vector<float>& sorted) {
  const float unit = 1 / static_cast<float>(t.bits);
  for (int64_t q = 0; q < kQueries; ++q) {
    float* s = t.scores.data() + q * t.num_keys;
    const float* label = t.label.data() + q * t.num_keys;
    int64_t wanted = 0;
    for (int64_t i = 0; i < t.num_keys; ++i) wanted += label[i] > 0;
    if (wanted == 0 || wanted == t.num_keys) {
      std::fill_n(s, t.num_keys, 0.0f);
      continue;
    }
    sorted.assign(s, s + t.num_keys);
    std::nth_element(sorted.begin(), sorted.begin() + wanted, sorted.end(), std::greater<>());
    const float boundary = sorted[wanted];
    float wanted_pull = 0, other_pull = 0;
    for (int64_t i = 0; i < t.num_keys; ++i) {
      const float pull = boundary_pull(s[i], boundary, label[i] > 0, unit);
      (label[i] > 0 ? wanted_pull : other_pull) += pull;
      s[i] = label[i] > 0 ? -pull : pull;
    }
    // The boundary moves with the scores, so nothing is won by moving all of them: both sides pull
    // equally.
    const float of_wanted = 1 / static_cast<float>(wanted);
    const float of_others = of_wanted * wanted_pull / std::max(other_pull, 1e-20f);
    for (int64_t i = 0; i < t.num_keys; ++i) s[i] *= label[i] > 0 ? of_wanted : of_others;
  }
}

}  // namespace

std::vector<float> train_boundary(const HeadShape& shape, std::span<const HeadSample> samples,
                                  const PolicyOptions& policy, std::span<const float> start,
                                  const HashTraining& training) {
  const int64_t width = input_width(shape), bits = training.bits;
  BatchDraws draws(samples, policy, training.seed);
  const float scale = key_scale(shape, samples, draws);
  std::vector<PreparedWindow> windows;
  std::vector<std::vector<float>> columns;  // [width, count] of each window's keys
  for (size_t w = 0; w < samples.size(); ++w) {
    windows.push_back(prepare_window(shape, samples[w], draws.tokens(w), scale));
    const PreparedWindow& made = windows.back();
    columns.emplace_back(made.keys.size());
    transpose(made.keys.data(), made.count, width, columns.back().data(), made.count);
  }
  std::vector<float> weights = start_rows(shape, start, bits);
  std::vector<float> mean(weights.size()), square(weights.size()), sorted;
  Trainer trainer(width, training.bits);
  AdamStep step;
  for (int32_t i = 0; i < training.iterations; ++i) {
    if (training.keep_going && !training.keep_going()) break;
    const Batch batch = draws.next();
    trainer.load(windows[batch.window], columns[batch.window], batch);
    trainer.forward(weights);
    boundary_loss(trainer, sorted);
    trainer.backward();
    step = adam_step(step, i, training.iterations);
    for (size_t w = 0; w < weights.size(); ++w) {
      adam_update(step, trainer.gradient[w], weights[w], mean[w], square[w]);
    }
  }
  return as_columns(shape, weights, bits, scale);
}

}  // namespace clo::training
