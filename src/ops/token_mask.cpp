#include "ops/token_mask.h"

namespace clo {

TokenMask::TokenMask(std::span<const TokenRange> ranges) : ranges_(ranges.begin(), ranges.end()) {
  masked_before_.push_back(0);
  for (const TokenRange& range : ranges_) {
    masked_before_.push_back(masked_before_.back() + range.end - range.first);
  }
}

size_t TokenMask::first_ending_after(int64_t token) const {
  const auto found =
      std::upper_bound(ranges_.begin(), ranges_.end(), token,
                       [](int64_t t, const TokenRange& range) { return t < range.end; });
  return static_cast<size_t>(found - ranges_.begin());
}

int64_t TokenMask::num_masked(int64_t token) const {
  const size_t i = first_ending_after(token);
  const int64_t inside = i < ranges_.size() ? std::max<int64_t>(0, token - ranges_[i].first) : 0;
  return masked_before_[i] + inside;
}

int64_t TokenMask::visible_token(int64_t rank) const {
  // Ranges that begin with no more than `rank` visible tokens before them lie before the token.
  size_t i = 0;
  for (size_t end = ranges_.size(); i < end;) {
    const size_t middle = (i + end) / 2;
    const bool before = ranges_[middle].first - masked_before_[middle] <= rank;
    (before ? i : end) = before ? middle + 1 : middle;
  }
  return rank + masked_before_[i];
}

}  // namespace clo
