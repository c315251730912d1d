#pragma once
// The rows that a head left out of a step's attention, drawn (ops/mass_draw.h) or all of them.
#include <cstdint>
#include <vector>

#include "kv/head_cache.h"
#include "ops/token_mask.h"

namespace clo {

// Visible tokens of a context that a head with a set did not attend to: `num_rows` of them drawn
// with replacement, or all where there are no more. mask: null for none. index: layer *
// num_kv_heads + kv_head. num_outside: how many there are.
void draw_rows(const HeadCacheView& head, const TokenMask* mask, int64_t context_tokens,
               int32_t index, int64_t num_outside, int32_t num_rows, std::vector<int32_t>& tokens);

}  // namespace clo
