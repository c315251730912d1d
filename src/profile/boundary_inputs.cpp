#include "profile/boundary_inputs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/units.h"
#include "profile/matrix.h"
#include "select/set_rule.h"

namespace clo::training {

namespace {

// Scales each row of x [rows, dim] to length sqrt(dim).
void normalise_rows(std::vector<float>& x, int64_t dim) {
  for (int64_t first = 0; first + dim <= std::ssize(x); first += dim) {
    double square = 0;
    for (int64_t d = 0; d < dim; ++d) square += double{x[first + d]} * x[first + d];
    if (!(square > 0)) continue;
    const auto scale = static_cast<float>(std::sqrt(static_cast<double>(dim) / square));
    for (int64_t d = 0; d < dim; ++d) x[first + d] *= scale;
  }
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

PreparedWindow prepare_window(const HeadShape& shape, const HeadSample& sample,
                              std::span<const int32_t> tokens) {
  const int64_t dim = shape.head_dim, steps = sample.window.num_steps;
  PreparedWindow made;
  made.count = std::ssize(tokens);
  made.label_words = divide_up(made.count, 64);
  made.keys.resize(static_cast<size_t>(made.count * dim));
  std::vector<int32_t> place(static_cast<size_t>(sample.window.num_tokens), -1);
  for (int64_t i = 0; i < made.count; ++i) {
    place[static_cast<size_t>(tokens[i])] = static_cast<int32_t>(i);
    std::copy_n(sample.window.keys.data() + int64_t{tokens[i]} * dim, dim,
                made.keys.data() + i * dim);
  }
  made.queries.assign(sample.window.queries.begin(), sample.window.queries.end());
  normalise_rows(made.keys, dim);
  normalise_rows(made.queries, dim);
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

std::vector<float> start_rows(std::span<const float> start, int64_t dim, int64_t bits) {
  CLO_CHECK(std::ssize(start) == dim * bits, start.size());
  std::vector<float> rows(start.size());
  transpose(start.data(), dim, bits, rows.data(), dim);
  normalise_rows(rows, dim);
  for (float& w : rows) w /= std::sqrt(static_cast<float>(dim));
  return rows;
}

std::vector<float> as_columns(std::span<const float> rows, int64_t dim, int64_t bits) {
  std::vector<float> columns(rows.size());
  transpose(rows.data(), bits, dim, columns.data(), bits);
  return columns;
}

}  // namespace clo::training
