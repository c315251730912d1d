#include "profile/plan.h"

#include <algorithm>
#include <numeric>

#include "base/units.h"
#include "kv/head_cache.h"
#include "reuse/persistent_heads.h"
#include "select/set_rule.h"

namespace clo {

namespace {

ReusePoint point_of(const Profile& profile, const KvShape& shape, size_t trial) {
  const HeadStatistics& s = profile.statistics;
  const size_t heads = s.overlap.size();
  ReusePoint point;
  point.eta = kTriedEtas[trial / kTriedExponents.size()];
  point.exponent = kTriedExponents[trial % kTriedExponents.size()];
  double weights = 0;
  for (size_t head = 0; head < heads; ++head) {
    const size_t at = head * kNumTrials + trial;
    point.hit_rate += s.trial_hit_rate[at];
    point.set_loss += s.trial_set_loss[at];
    point.fetched += s.trial_fetched[at];
    double weight = 0;
    for (int32_t g = 0; g < shape.group_size(); ++g) {
      weight += s.mass_outside[head * static_cast<size_t>(shape.group_size()) + g];
    }
    point.weighted_loss += weight * s.trial_set_loss[at];
    weights += weight;
  }
  const auto n = static_cast<double>(heads);
  point.hit_rate /= n;
  point.set_loss /= n;
  point.fetched /= n;
  point.weighted_loss = weights > 0 ? point.weighted_loss / weights : 0;
  return point;
}

// The highest hit rate within the loss; among equals the smaller loss. Without one the least loss.
size_t choose_point(const std::vector<ReusePoint>& points, double largest_loss, bool& within) {
  const auto better = [&](const ReusePoint& a, const ReusePoint& b) {
    const bool a_in = a.weighted_loss <= largest_loss, b_in = b.weighted_loss <= largest_loss;
    if (a_in != b_in) return a_in;
    if (!a_in) return a.weighted_loss < b.weighted_loss;
    if (a.hit_rate != b.hit_rate) return a.hit_rate > b.hit_rate;
    return a.weighted_loss < b.weighted_loss;
  };
  size_t best = 0;
  for (size_t i = 1; i < points.size(); ++i) {
    if (better(points[i], points[best])) best = i;
  }
  within = points[best].weighted_loss <= largest_loss;
  return best;
}

}  // namespace

Result<ResidencePlan> plan_residence(const Profile& profile, const PlanRequest& request) {
  const HeadStatistics& s = profile.statistics;
  if (s.trial_hit_rate.empty() || s.trial_fetched.empty() || s.trial_set_loss.empty() ||
      s.overlap.empty() || s.mass_outside.empty()) {
    return Error{ErrorCode::kBadRequest,
                 "the profile holds no trials of thresholds to plan with; make it again with clo "
                 "profile",
                 "--profile"};
  }
  const KvShape& shape = request.shape;
  ResidencePlan plan;
  plan.num_heads = std::ssize(s.overlap);
  for (size_t trial = 0; trial < kNumTrials; ++trial) {
    plan.points.push_back(point_of(profile, shape, trial));
  }
  plan.chosen = choose_point(plan.points, request.largest_loss, plan.within_loss);

  HeadCacheSpec spec;
  spec.sink_tokens = request.policy.sink;
  spec.ring_tokens = ring_tokens(request.policy);
  spec.slot_capacity = slot_capacity(request.policy, request.context_tokens);
  spec.capacity_tokens = request.context_tokens;
  const int64_t code_bytes =
      reads_codes(request.policy, shape)
          ? divide_up(request.context_tokens, kPageTokens) * kPageTokens * shape.code_bytes()
          : 0;
  const int64_t evictable_bytes = head_cache_bytes(shape, spec) + code_bytes;
  spec.resident = true;
  const int64_t persistent_bytes = head_cache_bytes(shape, spec) + code_bytes;
  plan.least_bytes = plan.num_heads * std::min(evictable_bytes, persistent_bytes);
  plan.most_bytes = plan.num_heads * persistent_bytes;
  if (request.budget_bytes < plan.least_bytes) {
    return Error{ErrorCode::kDeviceMemory,
                 "expected at least " + format_bytes(plan.least_bytes) + " (" +
                     std::to_string(plan.least_bytes) +
                     " bytes), what the heads need without any of them persistent at " +
                     std::to_string(request.context_tokens) + " tokens, found " +
                     format_bytes(request.budget_bytes) +
                     "; raise --budget, or lower --kv-ratio or --context",
                 "--budget"};
  }

  // Every head costs the same to keep, so bytes saved per byte of memory is bytes saved.
  const auto row_bytes = static_cast<double>(shape.stored_row_bytes());
  const auto set =
      static_cast<double>(std::min(set_size(request.policy, request.context_tokens),
                                   candidates(request.policy, request.context_tokens).size()));
  std::vector<double> fetched(static_cast<size_t>(plan.num_heads));
  for (size_t head = 0; head < fetched.size(); ++head) {
    fetched[head] = s.trial_fetched[head * kNumTrials + plan.chosen] * set * row_bytes;
  }
  std::vector<size_t> order(fetched.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return fetched[a] > fetched[b]; });
  const int64_t extra = persistent_bytes - evictable_bytes;
  const int64_t room = request.budget_bytes - plan.num_heads * evictable_bytes;
  const int64_t kept =
      extra <= 0 ? plan.num_heads : std::clamp<int64_t>(room / extra, 0, plan.num_heads);
  plan.device_bytes = kept * persistent_bytes + (plan.num_heads - kept) * evictable_bytes;
  for (int64_t i = 0; i < plan.num_heads; ++i) {
    const size_t head = order[i];
    if (i < kept) {
      plan.persistent.push_back({static_cast<int32_t>(head) / shape.num_kv_heads,
                                 static_cast<int32_t>(head) % shape.num_kv_heads, fetched[head]});
    } else {
      plan.bytes_per_step += fetched[head];
      plan.hit_rate += s.trial_hit_rate[head * kNumTrials + plan.chosen];
    }
  }
  const int64_t fetching = plan.num_heads - kept;
  if (fetching > 0) plan.hit_rate /= static_cast<double>(fetching);
  if (request.link_bytes_per_second > 0) {
    plan.fetch_seconds = plan.bytes_per_step / request.link_bytes_per_second;
  }
  plan.binding = fetching == 0                               ? Binding::kNothing
                 : plan.fetch_seconds > request.step_seconds ? Binding::kLink
                                                             : Binding::kDeviceMemory;
  return plan;
}

}  // namespace clo
