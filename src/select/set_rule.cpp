#include "select/set_rule.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/units.h"

namespace clo {

CandidateRange candidates(const PolicyOptions& policy, int64_t context_tokens) {
  const int64_t first = policy.sink;
  return {first, std::max<int64_t>(first, context_tokens - policy.recent)};
}

int64_t set_size(const PolicyOptions& policy, int64_t context_tokens) {
  if (policy.set_tokens > 0) return policy.set_tokens;
  const auto share =
      static_cast<int64_t>(std::ceil(policy.kv_ratio * static_cast<double>(context_tokens) - 1e-9));
  return std::max<int64_t>(256, round_up(share, 64));
}

int64_t scaled_set_size(int64_t set_tokens, double scale) {
  const auto scaled = static_cast<int64_t>(scale * static_cast<double>(set_tokens));
  return std::max<int64_t>(64, round_up(scaled, 64));
}

int32_t slot_capacity(const PolicyOptions& policy, int64_t max_context_tokens) {
  const int64_t most = candidates(policy, max_context_tokens).size();
  const int64_t size = set_size(policy, max_context_tokens);
  const int64_t largest = policy.quality ? scaled_set_size(size, kMostSetScale) : size;
  return static_cast<int32_t>(std::min(largest, std::max<int64_t>(most, 1)));
}

SelectKind select_kind(Select select) {
  switch (select) {
    case Select::kNone:
    case Select::kHash:
      return SelectKind::kHash;
    case Select::kGradedHash:
      return SelectKind::kGradedHash;
    case Select::kExact:
      return SelectKind::kExact;
    case Select::kRandom:
      return SelectKind::kRandom;
  }
  CLO_CHECK(false, static_cast<int>(select));
  return SelectKind::kHash;
}

int32_t ring_tokens(const PolicyOptions& policy) { return policy.recent + policy.max_label_age; }

}  // namespace clo
