#include "attention/mass_rows.h"

#include <algorithm>

#include "ops/mass_draw.h"

namespace clo {

namespace {

// Whether a token is in the head's set. A resident head's is a sorted list.
bool in_set(const HeadCacheView& head, int64_t token) {
  if (!head.is_resident()) return holds(head, token);
  return std::binary_search(head.slot_token, head.slot_token + head.state->num_slots_used,
                            static_cast<int32_t>(token));
}

}  // namespace

void draw_rows(const HeadCacheView& head, const TokenMask* mask, int64_t context_tokens,
               int32_t index, int64_t num_outside, int32_t num_rows, std::vector<int32_t>& tokens) {
  tokens.clear();
  const auto is_outside = [&](int64_t token) {
    return !in_set(head, token) && (mask == nullptr || !mask->hides(token));
  };
  const int64_t first = std::min<int64_t>(head.sink_tokens, context_tokens);
  const int64_t end = std::max(first, context_tokens - head.ring_tokens);
  if (num_outside <= num_rows) {
    for (int64_t t = first; t < end; ++t) {
      if (is_outside(t)) tokens.push_back(static_cast<int32_t>(t));
    }
    return;
  }
  for (int32_t number = 0; number < num_rows; ++number) {
    for (uint32_t attempt = 0;; ++attempt) {
      const int64_t token = drawn_token(context_tokens, index, number, attempt, first, end - first);
      if (!is_outside(token)) continue;
      tokens.push_back(static_cast<int32_t>(token));
      break;
    }
  }
}

}  // namespace clo
