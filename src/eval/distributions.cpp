#include "eval/distributions.h"

#include <algorithm>
#include <cmath>

namespace clo {

double log_sum_exp(std::span<const float> row) {
  const double best = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float x : row) sum += std::exp(static_cast<double>(x) - best);
  return best + std::log(sum);
}

size_t most_likely(std::span<const float> row) {
  return static_cast<size_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

double kl_divergence(std::span<const float> p, std::span<const float> q) {
  const double p_total = log_sum_exp(p), q_total = log_sum_exp(q);
  double kl = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double log_p = static_cast<double>(p[i]) - p_total;
    const double log_q = static_cast<double>(q[i]) - q_total;
    kl += std::exp(log_p) * (log_p - log_q);
  }
  return kl;
}

}  // namespace clo
