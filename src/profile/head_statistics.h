#pragma once
// Figures of one KV head from its recorded windows: how alike queries of near steps are, how far
// the exact sets of adjacent steps agree, and what a reuse rule would have made of them. Pure
// functions; docs/profile.md defines every figure.
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "clo/policy.h"
#include "io/rope.h"
#include "profile/head_attention.h"

namespace clo {

inline constexpr int32_t kMaxLag = 16;

// Mean and quantiles of a sample; all 0 for an empty one. A quantile lies between the two ordered
// values around (size - 1) x its share, in proportion.
inline constexpr int32_t kNumSpread = 6;
inline constexpr std::array<double, kNumSpread - 1> kQuantiles = {0.05, 0.25, 0.5, 0.75, 0.95};
std::array<float, kNumSpread> spread_of(std::vector<float> values);

// 0 where either vector has no length.
float cosine_of(std::span<const float> a, std::span<const float> b);

// Turns a rotated query at `position` back; a factor that YaRN puts on it stays. x [head_dim].
void undo_rotation(std::span<float> x, std::span<const float> inverse_frequencies,
                   int64_t position);

// Cosines between a query head's queries of steps that lie 1 to kMaxLag apart, over all windows.
// result[lag - 1][i]. `inverse_frequencies` [head_dim / 2] or empty: rotations are undone first.
std::array<std::array<float, kNumSpread>, kMaxLag> query_cosines(
    const HeadShape& shape, std::span<const HeadWindow> windows, int32_t query_head,
    std::span<const float> inverse_frequencies);

// Mean Jaccard index of the exact sets of adjacent steps.
double adjacent_overlap(std::span<const HeadAttention> attention);

// Share of steps whose query differs so much from the one before that the policy would not keep the
// set: P(cosine of the group < tau). importance [group_size].
double reuse_difficulty(const HeadShape& shape, std::span<const HeadWindow> windows,
                        const PolicyOptions& policy, std::span<const float> importance);

// What the policy's reuse rule does on the recorded steps, sets chosen exactly. The first step of a
// window chooses, and is not counted.
struct ReuseTrial {
  double hit_rate = 0;
  double set_loss = 0;     // mean over steps: share of the exact set that is not attended
  double fetched = 0;      // mean over steps: rows fetched, as a share of the set
  double new_on_miss = 0;  // the same over misses alone
};
ReuseTrial try_reuse(const HeadShape& shape, std::span<const HeadWindow> windows,
                     std::span<const HeadAttention> attention, const PolicyOptions& policy,
                     std::span<const float> importance);

}  // namespace clo
