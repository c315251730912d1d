#include "profile/head_statistics.h"

#include <algorithm>
#include <cmath>

#include "reuse/reuse_rule.h"
#include "select/set_rule.h"

namespace clo {

namespace {

std::span<const float> query_at(const HeadShape& shape, const HeadWindow& window, int64_t head,
                                int64_t step) {
  return window.queries.subspan(
      static_cast<size_t>((head * window.num_steps + step) * shape.head_dim),
      static_cast<size_t>(shape.head_dim));
}

// cosines [group_size] between the queries of two steps.
void group_cosines(const HeadShape& shape, const HeadWindow& window, int64_t step, int64_t label,
                   std::vector<float>& cosines) {
  cosines.resize(static_cast<size_t>(shape.group_size));
  for (int32_t g = 0; g < shape.group_size; ++g) {
    cosines[g] = cosine_of(query_at(shape, window, g, step), query_at(shape, window, g, label));
  }
}

}  // namespace

std::array<float, kNumSpread> spread_of(std::vector<float> values) {
  std::array<float, kNumSpread> result = {};
  if (values.empty()) return result;
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const float v : values) sum += v;
  result[0] = static_cast<float>(sum / static_cast<double>(values.size()));
  for (size_t i = 0; i < kQuantiles.size(); ++i) {
    const double place = kQuantiles[i] * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    const double share = place - static_cast<double>(below);
    result[i + 1] = static_cast<float>((1 - share) * values[below] + share * values[above]);
  }
  return result;
}

float cosine_of(std::span<const float> a, std::span<const float> b) {
  float dot = 0, a_square = 0, b_square = 0;
  for (size_t d = 0; d < a.size(); ++d) {
    dot += a[d] * b[d];
    a_square += a[d] * a[d];
    b_square += b[d] * b[d];
  }
  const float cosine = dot / (std::sqrt(a_square) * std::sqrt(b_square));
  return std::isfinite(cosine) ? cosine : 0.0f;
}

void undo_rotation(std::span<float> x, std::span<const float> inverse_frequencies,
                   int64_t position) {
  const size_t half = x.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    // As the rotation is made: the angle in f32, its cosine from a double.
    const double angle = static_cast<float>(position) * inverse_frequencies[i];
    const auto cosine = static_cast<float>(std::cos(angle));
    const auto sine = static_cast<float>(std::sin(angle));
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine + b * sine;
    x[i + half] = b * cosine - a * sine;
  }
}

std::array<std::array<float, kNumSpread>, kMaxLag> query_cosines(
    const HeadShape& shape, std::span<const HeadWindow> windows, int32_t query_head,
    std::span<const float> inverse_frequencies) {
  std::array<std::vector<float>, kMaxLag> values;
  const auto dim = static_cast<size_t>(shape.head_dim);
  std::vector<float> queries;
  for (const HeadWindow& window : windows) {
    const auto first = query_at(shape, window, query_head, 0).begin();
    queries.assign(first, first + window.num_steps * shape.head_dim);
    const auto at = [&](int64_t step) {
      return std::span(queries).subspan(static_cast<size_t>(step) * dim, dim);
    };
    for (int64_t step = 0; step < window.num_steps && !inverse_frequencies.empty(); ++step) {
      undo_rotation(at(step), inverse_frequencies, window.context_of(step) - 1);
    }
    for (int32_t lag = 1; lag <= kMaxLag; ++lag) {
      for (int64_t step = lag; step < window.num_steps; ++step) {
        values[lag - 1].push_back(cosine_of(at(step), at(step - lag)));
      }
    }
  }
  std::array<std::array<float, kNumSpread>, kMaxLag> result;
  for (int32_t lag = 0; lag < kMaxLag; ++lag) result[lag] = spread_of(std::move(values[lag]));
  return result;
}

double adjacent_overlap(std::span<const HeadAttention> attention) {
  double sum = 0;
  int64_t pairs = 0;
  for (const HeadAttention& window : attention) {
    for (int64_t step = 1; step < std::ssize(window.sizes); ++step) {
      const int64_t both = tokens_in_both(window.set(step), window.set(step - 1));
      const int64_t either = window.sizes[step] + window.sizes[step - 1] - both;
      if (either == 0) continue;
      sum += static_cast<double>(both) / static_cast<double>(either);
      ++pairs;
    }
  }
  return pairs == 0 ? 0 : sum / static_cast<double>(pairs);
}

double reuse_difficulty(const HeadShape& shape, std::span<const HeadWindow> windows,
                        const PolicyOptions& policy, std::span<const float> importance) {
  int64_t steps = 0, hard = 0;
  std::vector<float> cosines;
  for (const HeadWindow& window : windows) {
    for (int64_t step = 1; step < window.num_steps; ++step) {
      group_cosines(shape, window, step, step - 1, cosines);
      hard += !similar_enough(policy, cosines, importance);
      ++steps;
    }
  }
  return steps == 0 ? 0 : static_cast<double>(hard) / static_cast<double>(steps);
}

ReuseTrial try_reuse(const HeadShape& shape, std::span<const HeadWindow> windows,
                     std::span<const HeadAttention> attention, const PolicyOptions& policy,
                     std::span<const float> importance) {
  int64_t steps = 0, hits = 0, misses = 0;
  double lost = 0, fetched = 0;
  std::vector<float> cosines;
  for (size_t w = 0; w < windows.size(); ++w) {
    const HeadWindow& window = windows[w];
    int64_t label = 0;
    for (int64_t step = 1; step < window.num_steps; ++step) {
      const int64_t size = attention[w].sizes[step];
      if (size == 0) continue;
      ++steps;
      group_cosines(shape, window, step, label, cosines);
      // 10 % of the context never covers every candidate here, so a set is never incomplete.
      const SetHistory history = {true, window.context_of(label), 0, false};
      const int64_t label_end = candidates(policy, window.context_of(label)).end;
      const Decision decision =
          decide(policy, history, window.context_of(step), false, 0, cosines, importance);
      const auto now = attention[w].set(step), held = attention[w].set(label);
      if (decision == Decision::kHit) {
        ++hits;
        // Tokens that have left `recent` since are in the ring still, so they are attended.
        lost +=
            static_cast<double>(tokens_missing(now, held, label_end)) / static_cast<double>(size);
        continue;
      }
      ++misses;
      fetched += static_cast<double>(size - tokens_in_both(now, held)) / static_cast<double>(size);
      label = step;
    }
  }
  ReuseTrial trial;
  if (steps == 0) return trial;
  const auto n = static_cast<double>(steps);
  trial.hit_rate = static_cast<double>(hits) / n;
  trial.set_loss = lost / n;
  trial.fetched = fetched / n;
  trial.new_on_miss = misses == 0 ? 0 : fetched / static_cast<double>(misses);
  return trial;
}

}  // namespace clo
