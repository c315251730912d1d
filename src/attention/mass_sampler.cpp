#include "attention/mass_sampler.h"

#include <algorithm>
#include <numeric>

#include "base/split_mix.h"

namespace clo {

MassSampler::MassSampler(Dial dial, int64_t num_heads)
    : dial_(dial), order_(static_cast<size_t>(num_heads)), at_(order_.size()) {
  std::iota(order_.begin(), order_.end(), 0);
}

void MassSampler::begin_step() {
  now_.clear();
  while (std::ssize(now_) < kHeadsAtOnce) {
    if (at_ == order_.size()) {
      for (size_t i = order_.size(); i > 1; --i)
        std::swap(order_[i - 1], order_[split_mix(state_) % i]);
      at_ = 0;
    }
    now_.push_back(order_[at_++]);
  }
}

bool MassSampler::is_looked_at(int64_t head) const {
  return std::find(now_.begin(), now_.end(), head) != now_.end();
}

void MassSampler::draw_rows(const HeadCacheView& head, const TokenMask* mask,
                            int64_t context_tokens, int64_t num_outside, int32_t num_rows,
                            std::vector<int32_t>& tokens) {
  tokens.clear();
  const auto is_outside = [&](int64_t token) {
    return !holds(head, token) && (mask == nullptr || !mask->hides(token));
  };
  const int64_t first = std::min<int64_t>(head.sink_tokens, context_tokens);
  const int64_t end = std::max(first, context_tokens - head.ring_tokens);
  if (num_outside <= num_rows) {
    for (int64_t t = first; t < end; ++t) {
      if (is_outside(t)) tokens.push_back(static_cast<int32_t>(t));
    }
    return;
  }
  while (std::ssize(tokens) < num_rows) {
    const auto token = static_cast<int32_t>(
        first + static_cast<int64_t>(split_mix(state_) % static_cast<uint64_t>(end - first)));
    if (is_outside(token)) tokens.push_back(token);
  }
}

}  // namespace clo
