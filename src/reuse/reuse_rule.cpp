#include "reuse/reuse_rule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace clo {

namespace {

// Cosines of unit vectors can leave [-1, 1] by rounding; NaN passes through.
double clamp_cosine(float cosine) {
  return std::isnan(cosine) ? static_cast<double>(cosine)
                            : std::clamp(static_cast<double>(cosine), -1.0, 1.0);
}

}  // namespace

double head_threshold(const PolicyOptions& policy, float importance) {
  if (policy.threshold) return *policy.threshold;
  if (policy.eta > 1) return policy.eta;
  const double lambda =
      std::pow(std::clamp(static_cast<double>(importance), 0.0, 1.0), policy.importance_exponent);
  if (lambda == 0) return -1;
  return std::cos(lambda * std::acos(std::max(policy.eta, -1.0)) + (1 - lambda) * std::numbers::pi);
}

double ahead_threshold(double tau, double margin) {
  if (margin == 0 || tau <= -1 || tau > 1) return tau;
  return std::cos(std::min((1 - margin) * std::acos(tau), std::numbers::pi));
}

double prefetch_margin(const PolicyOptions& policy) {
  return policy.correction == Correction::kTrueQuery ? policy.prefetch_margin : 0;
}

bool similar_enough(const PolicyOptions& policy, std::span<const float> cosine,
                    std::span<const float> importance, double margin) {
  double sum = 0, weights = 0, total_importance = 0;
  float largest = 0;
  for (size_t j = 0; j < cosine.size(); ++j) {
    const double c = clamp_cosine(cosine[j]);
    if (std::isnan(c)) return false;
    if (policy.aggregate == Aggregate::kAll &&
        !(c >= ahead_threshold(head_threshold(policy, importance[j]), margin))) {
      return false;
    }
    const double weight = policy.aggregate == Aggregate::kWeighted ? importance[j] : 1.0;
    sum += weight * c;
    weights += weight;
    total_importance += importance[j];
    largest = std::max(largest, importance[j]);
  }
  if (policy.aggregate == Aggregate::kAll) return true;
  const float importance_of_group =
      policy.aggregate == Aggregate::kWeighted
          ? largest
          : static_cast<float>(total_importance / static_cast<double>(cosine.size()));
  const double tau = ahead_threshold(head_threshold(policy, importance_of_group), margin);
  if (tau <= -1) return true;
  if (tau > 1) return false;
  if (weights == 0) return true;  // no head of the group matters
  return sum / weights >= tau;
}

Decision decide(const PolicyOptions& policy, const SetHistory& history, int64_t context_tokens,
                bool set_covers_candidates, int64_t ring_begin, std::span<const float> cosine,
                std::span<const float> importance, double margin) {
  if (!history.has_label) return Decision::kMiss;
  if (set_covers_candidates && (!history.took_all || history.candidates_end < ring_begin)) {
    return Decision::kIncomplete;
  }
  if (history.too_small) return Decision::kIncomplete;
  if (policy.max_label_age > 0 && context_tokens - history.label_length > policy.max_label_age) {
    return Decision::kAged;
  }
  return similar_enough(policy, cosine, importance, margin) ? Decision::kHit : Decision::kMiss;
}

double group_mean(const PolicyOptions& policy, std::span<const float> values,
                  std::span<const float> importance) {
  double sum = 0, weights = 0;
  for (size_t j = 0; j < values.size(); ++j) {
    const double weight = policy.aggregate == Aggregate::kWeighted ? importance[j] : 1.0;
    sum += weight * static_cast<double>(values[j]);
    weights += weight;
  }
  return weights == 0 ? 0 : sum / weights;
}

float score_drift(std::span<const float> query, std::span<const float> label, float spread,
                  float scale) {
  double square = 0;
  for (size_t d = 0; d < query.size(); ++d) {
    const double moved = static_cast<double>(query[d]) - static_cast<double>(label[d]);
    square += moved * moved;
  }
  return static_cast<float>(scale * std::sqrt(square) * spread);
}

}  // namespace clo
