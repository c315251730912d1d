#include "profile/head_attention.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/units.h"
#include "profile/matrix.h"
#include "reference/simd.h"
#include "select/set_rule.h"

namespace clo {

namespace {

constexpr int64_t kSteps = 8;  // steps whose scores are held at once

// Entropy and modes of one query, from its scores, exp(score - max) and their sum.
void spread(const float* scores, const float* weights, int64_t tokens, double max, double sum,
            float& entropy, float& modes) {
  double weighted = 0;
  int runs = 0;
  bool in_run = false;
  for (int64_t first = 0; first < tokens; first += kModeBlockTokens) {
    const int64_t last = std::min(first + kModeBlockTokens, tokens);
    float mass = 0, products = 0;
    for (int64_t t = first; t < last; ++t) {
      mass += weights[t];
      products += weights[t] * (scores[t] - static_cast<float>(max));
    }
    weighted += products;
    const bool heavy = mass >= kModeMass * sum;
    runs += heavy && !in_run;
    in_run = heavy;
  }
  // -sum p log p with log p = (score - max) - log(sum).
  entropy = static_cast<float>(std::max(std::log(sum) - weighted / sum, 0.0));
  modes = static_cast<float>(runs);
}

}  // namespace

int64_t measured_set_size(const PolicyOptions& policy, int64_t context_tokens) {
  const auto share = std::llround(kMeasuredRatio * static_cast<double>(context_tokens));
  return std::min(std::max<int64_t>(1, share), candidates(policy, context_tokens).size());
}

HeadAttention measure_attention(const HeadShape& shape, const HeadWindow& window,
                                const PolicyOptions& policy, float scale) {
  const SimdTable& simd = simd_table();
  const int64_t group = shape.group_size, dim = shape.head_dim, steps = window.num_steps;
  const int64_t columns = padded_columns(window.num_tokens);
  std::vector<float> keys(static_cast<size_t>(dim * columns));
  transpose(window.keys.data(), window.num_tokens, dim, keys.data(), columns);

  HeadAttention result;
  result.words_per_set = divide_up(window.num_tokens, 64);
  result.sets.assign(static_cast<size_t>(steps * result.words_per_set), 0);
  result.sizes.resize(static_cast<size_t>(steps));
  result.largest_set = measured_set_size(policy, window.context_of(steps - 1));
  result.shares.resize(static_cast<size_t>(steps * result.largest_set));
  for (std::vector<float>* figure : {&result.outside, &result.entropy, &result.modes}) {
    figure->resize(static_cast<size_t>(group * steps));
  }
  const auto rows = static_cast<size_t>(kSteps * group);
  std::vector<float> queries(rows * static_cast<size_t>(dim));
  std::vector<float> scores(rows * static_cast<size_t>(columns)), weights(scores.size());
  std::vector<float> max(rows), sum(rows), rescale(rows), vote, sorted;
  std::vector<int> limit(rows);
  for (int64_t first = 0; first < steps; first += kSteps) {
    const int64_t count = std::min(kSteps, steps - first);
    for (int64_t i = 0; i < count * group; ++i) {  // row i: query head i % group of a step
      const int64_t step = first + i / group;
      const float* query = window.queries.data() + ((i % group) * steps + step) * dim;
      for (int64_t d = 0; d < dim; ++d) queries[i * dim + d] = query[d] * scale;
      limit[i] = static_cast<int>(window.context_of(step));
      max[i] = -INFINITY;
      sum[i] = 0;
    }
    multiply(queries.data(), keys.data(), scores.data(), count * group, dim, columns);
    weights = scores;
    simd.softmax_tile(weights.data(), static_cast<int>(count * group), static_cast<int>(columns),
                      limit.data(), max.data(), sum.data(), rescale.data());
    for (int64_t s = 0; s < count; ++s) {
      const int64_t step = first + s, context = window.context_of(step);
      const CandidateRange range = candidates(policy, context);
      vote.assign(static_cast<size_t>(range.size()), 0.0f);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t row = s * group + g, at = g * steps + step;
        const float* w = weights.data() + row * columns;
        spread(scores.data() + row * columns, w, context, max[row], sum[row], result.entropy[at],
               result.modes[at]);
        double mass = 0;
        for (int64_t t = range.first; t < range.end; ++t) mass += w[t];
        result.outside[at] = static_cast<float>(std::min(mass / sum[row], 1.0));
        if (!(mass > 0)) continue;
        const auto share = static_cast<float>(1 / mass);
        for (int64_t i = 0; i < range.size(); ++i) vote[i] += w[range.first + i] * share;
      }
      int64_t left = measured_set_size(policy, context);
      result.sizes[step] = static_cast<int32_t>(left);
      if (left == 0) continue;
      sorted = vote;
      std::nth_element(sorted.begin(), sorted.begin() + (left - 1), sorted.end(), std::greater<>());
      const float least = sorted[left - 1];
      for (const float v : vote) left -= v > least;  // what is left are ties
      uint64_t* set = result.sets.data() + step * result.words_per_set;
      float* share = result.shares.data() + step * result.largest_set;
      for (int64_t i = 0; i < range.size(); ++i) {
        const bool tie = vote[i] == least && left > 0;
        left -= tie;
        if (vote[i] > least || tie) {
          const int64_t token = range.first + i;
          set[token / 64] |= uint64_t{1} << (token % 64);
          *share++ = vote[i] / static_cast<float>(group);
        }
      }
    }
  }
  return result;
}

int64_t tokens_in_both(std::span<const uint64_t> a, std::span<const uint64_t> b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += std::popcount(a[i] & b[i]);
  return count;
}

int64_t tokens_missing(std::span<const uint64_t> a, std::span<const uint64_t> b, int64_t end) {
  int64_t count = 0;
  for (int64_t i = 0; i < std::ssize(a) && i * 64 < end; ++i) {
    uint64_t missing = a[i] & ~b[i];
    if (end - i * 64 < 64) missing &= (uint64_t{1} << (end - i * 64)) - 1;
    count += std::popcount(missing);
  }
  return count;
}

}  // namespace clo
