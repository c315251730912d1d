#include "profile/boundary_inputs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/units.h"
#include "select/set_rule.h"

namespace clo::training {

namespace {

double length(const float* x, int64_t dim) {
  double square = 0;
  for (int64_t d = 0; d < dim; ++d) square += double{x[d]} * x[d];
  return std::sqrt(square);
}

}  // namespace

int64_t num_training_keys(const HeadSample& sample, const PolicyOptions& policy) {
  return std::min(kMostRunKeys,
                  candidates(policy, sample.window.context_of(sample.first_step)).size());
}

BatchDraws::BatchDraws(std::span<const HeadSample> samples, const PolicyOptions& policy,
                       uint64_t seed)
    : random_(seed) {
  for (const HeadSample& sample : samples) {
    CLO_CHECK(sample.end_step > sample.first_step, sample.first_step, sample.end_step);
    const CandidateRange range = candidates(policy, sample.window.context_of(sample.first_step));
    CLO_CHECK(range.size() >= 16, range.size());
    Window window{std::vector<int32_t>(static_cast<size_t>(range.size())), sample.first_step,
                  sample.end_step};
    std::iota(window.tokens.begin(), window.tokens.end(), static_cast<int32_t>(range.first));
    for (int64_t i = range.size() - 1; i > 0; --i) {
      std::swap(window.tokens[i], window.tokens[random_.below(i + 1)]);
    }
    window.tokens.resize(static_cast<size_t>(num_training_keys(sample, policy)));
    windows_.push_back(std::move(window));
  }
}

Batch BatchDraws::next() {
  Batch batch;
  batch.window = static_cast<size_t>(random_.below(std::ssize(windows_)));
  const Window& window = windows_[batch.window];
  const int64_t count = std::ssize(window.tokens);
  batch.num_keys = std::min(kMostKeys, count / 16 * 16);
  batch.first_key = random_.below(count - batch.num_keys + 1);
  for (int64_t& step : batch.steps) {
    step = window.first_step + random_.below(window.end_step - window.first_step);
  }
  return batch;
}

float key_scale(const HeadShape& shape, std::span<const HeadSample> samples,
                const BatchDraws& draws) {
  double sum = 0;
  int64_t count = 0;
  for (size_t w = 0; w < samples.size(); ++w) {
    for (const int32_t token : draws.tokens(w)) {
      sum +=
          length(samples[w].window.keys.data() + int64_t{token} * shape.head_dim, shape.head_dim);
      ++count;
    }
  }
  const double mean = sum / static_cast<double>(count);
  return mean > 0 ? static_cast<float>(std::sqrt(static_cast<double>(shape.head_dim)) / mean)
                  : 1.0f;
}

PreparedWindow prepare_window(const HeadShape& shape, const HeadSample& sample,
                              std::span<const int32_t> tokens, float scale) {
  const HeadWindow& window = sample.window;
  const int64_t dim = shape.head_dim, width = input_width(shape), steps = window.num_steps;
  PreparedWindow made;
  made.count = std::ssize(tokens);
  made.label_words = divide_up(made.count, 64);
  made.keys.assign(static_cast<size_t>(made.count * width), 0.0f);
  std::vector<int32_t> place(static_cast<size_t>(window.num_tokens), -1);
  for (int64_t i = 0; i < made.count; ++i) {
    place[static_cast<size_t>(tokens[i])] = static_cast<int32_t>(i);
    const float* key = window.keys.data() + int64_t{tokens[i]} * dim;
    float* out = made.keys.data() + i * width;
    for (int64_t d = 0; d < dim; ++d) out[d] = scale * key[d];
    out[dim] = kBiasInput;
  }
  made.queries.assign(static_cast<size_t>(steps * width), 0.0f);
  for (int64_t step = 0; step < steps; ++step) {
    float* out = made.queries.data() + step * width;
    for (int64_t g = 0; g < shape.group_size; ++g) {
      const float* query = window.queries.data() + (g * steps + step) * dim;
      for (int64_t d = 0; d < dim; ++d) out[d] += query[d];
    }
    const double own = length(out, dim);
    if (!(own > 0)) continue;
    const auto factor = static_cast<float>(std::sqrt(static_cast<double>(dim)) / own);
    for (int64_t d = 0; d < dim; ++d) out[d] *= factor;
  }
  made.labels.assign(static_cast<size_t>(steps * made.label_words), 0);
  for (int64_t step = sample.first_step; step < sample.end_step; ++step) {
    const std::span<const uint64_t> set = sample.attention->set(step);
    uint64_t* labels = made.labels.data() + step * made.label_words;
    for (size_t word = 0; word < set.size(); ++word) {
      for (uint64_t left = set[word]; left != 0; left &= left - 1) {
        // Tokens beyond the sample, or that have become candidates since, are not among the keys.
        const int32_t i = place[word * 64 + static_cast<size_t>(std::countr_zero(left))];
        if (i >= 0) labels[i / 64] |= uint64_t{1} << (i % 64);
      }
    }
  }
  return made;
}

std::vector<float> start_rows(const HeadShape& shape, std::span<const float> start, int64_t bits) {
  const int64_t dim = shape.head_dim, width = input_width(shape);
  CLO_CHECK(std::ssize(start) == hash_weight_count(dim, bits), start.size());
  std::vector<float> rows(static_cast<size_t>(bits * width), 0.0f);
  for (int64_t b = 0; b < bits; ++b) {
    float* row = rows.data() + b * width;
    for (int64_t d = 0; d < dim; ++d) row[d] = start[d * bits + b];
    CLO_CHECK(start[dim * bits + b] == 0, b);
    const double own = length(row, dim);
    if (!(own > 0)) continue;
    for (int64_t d = 0; d < dim; ++d) row[d] = static_cast<float>(row[d] / own);
  }
  return rows;
}

std::vector<float> as_columns(const HeadShape& shape, std::span<const float> rows, int64_t bits,
                              float scale) {
  const int64_t dim = shape.head_dim, width = input_width(shape);
  std::vector<float> columns(static_cast<size_t>(hash_weight_count(dim, bits)));
  for (int64_t b = 0; b < bits; ++b) {
    for (int64_t d = 0; d < dim; ++d) columns[d * bits + b] = rows[b * width + d];
    columns[dim * bits + b] = rows[b * width + dim] * kBiasInput / scale;
  }
  return columns;
}

}  // namespace clo::training
