#pragma once
// What exact attention does in the recorded steps of one KV head: which tokens it would choose, and
// how its softmax weight is spread. Pure functions over a trace.
#include <cstdint>
#include <span>
#include <vector>

#include "clo/policy.h"
#include "profile/trace.h"

namespace clo {

// Of a KV head: the query heads that share it, and their size.
struct HeadShape {
  int32_t group_size = 1;
  int32_t head_dim = 0;
};

// Tokens of a measured set: 10 % of the context, whatever the policy's ratio and least size are,
// so that figures of two profiles mean the same; fewer where there are fewer candidates.
inline constexpr double kMeasuredRatio = 0.1;
int64_t measured_set_size(const PolicyOptions& policy, int64_t context_tokens);

// A block of tokens is a mode's part when it holds this share of the softmax weight.
inline constexpr int64_t kModeBlockTokens = 64;
inline constexpr double kModeMass = 0.1;

// One window of one KV head.
struct HeadAttention {
  int64_t words_per_set = 0;
  std::vector<uint64_t> sets;  // [num_steps, words_per_set] bit t: token t is in the exact set
  std::vector<int32_t> sizes;  // [num_steps] tokens in it
  int64_t largest_set = 0;
  // [num_steps, largest_set] of the set's tokens in order: the share of the softmax weight over the
  // candidates, mean over the group.
  std::vector<float> shares;
  std::vector<float> outside;  // [group_size, num_steps] weight on neither sink nor recent
  std::vector<float> entropy;  // [group_size, num_steps] nats
  std::vector<float> modes;    // [group_size, num_steps] maximal runs of heavy blocks

  std::span<const uint64_t> set(int64_t step) const {
    return std::span(sets).subspan(static_cast<size_t>(step * words_per_set),
                                   static_cast<size_t>(words_per_set));
  }
  std::span<const float> shares_of(int64_t step) const {
    return std::span(shares).subspan(static_cast<size_t>(step * largest_set),
                                     static_cast<size_t>(sizes[static_cast<size_t>(step)]));
  }
};

// Sets are chosen as `--select exact` does it: among the policy's candidates, by the sum over the
// group of each head's softmax over the candidates; among equals the lower token wins.
// `scale` multiplies query-key products.
HeadAttention measure_attention(const HeadShape& shape, const HeadWindow& window,
                                const PolicyOptions& policy, float scale);

// Tokens in both sets, and those of a that b lacks, tokens from `end` on not counted.
int64_t tokens_in_both(std::span<const uint64_t> a, std::span<const uint64_t> b);
int64_t tokens_missing(std::span<const uint64_t> a, std::span<const uint64_t> b, int64_t end);

}  // namespace clo
