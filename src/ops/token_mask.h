#pragma once
// Tokens of a sequence that no other token may attend to. They keep their positions and their rows;
// a masked token's own query sees itself beside the visible tokens before it, so that its softmax
// is over at least one row. Made once for a sequence, never changed.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "clo/report.h"

namespace clo {

class TokenMask {
 public:
  // ranges: of masked tokens, ascending, disjoint, none empty, from token 0 on.
  explicit TokenMask(std::span<const TokenRange> ranges);

  bool hides(int64_t token) const { return num_masked(token + 1) > num_masked(token); }
  // Of tokens [first, end), those that are not masked. Requires: 0 <= first.
  int64_t num_visible(int64_t first, int64_t end) const {
    return end <= first ? 0 : end - first - (num_masked(end) - num_masked(first));
  }
  // The token that has `rank` visible ones before it. Requires: rank >= 0.
  int64_t visible_token(int64_t rank) const;

  // Calls run(first, end) for the runs of visible tokens in [first, end), ascending, none empty.
  template <typename Run>
  void for_each_visible(int64_t first, int64_t end, const Run& run) const {
    for (size_t i = first_ending_after(first); i < ranges_.size() && ranges_[i].first < end; ++i) {
      if (ranges_[i].first > first) run(first, ranges_[i].first);
      first = ranges_[i].end;
    }
    if (first < end) run(first, end);
  }
  // ... and of masked ones.
  template <typename Run>
  void for_each_masked(int64_t first, int64_t end, const Run& run) const {
    if (first >= end) return;
    for (size_t i = first_ending_after(first); i < ranges_.size() && ranges_[i].first < end; ++i) {
      run(std::max(first, ranges_[i].first), std::min(end, ranges_[i].end));
    }
  }

 private:
  // Masked tokens before `token`.
  int64_t num_masked(int64_t token) const;
  // Index of the first range with tokens at `token` or later.
  size_t first_ending_after(int64_t token) const;

  std::vector<TokenRange> ranges_;
  std::vector<int64_t> masked_before_;  // [ranges + 1] tokens in the ranges before each
};

}  // namespace clo
