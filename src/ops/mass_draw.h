#pragma once
// Which heads a decode step looks at for the attention mass that it keeps, and which of the rows
// that such a head left out are drawn to estimate theirs. Functions of context, head and number
// alone, the same for every sequence and on every backend: an answer depends on its request only.
// Pure; for host and device.
#include <cstdint>

#include "base/split_mix.h"

namespace clo {

// Every so many decode steps, so many heads are looked at, and so many rows drawn of those that
// such a head left out. (A look takes as long as reads scattered over the store take; heads looked
// at together wait for theirs together.)
inline constexpr int32_t kMassPeriod = 8;
inline constexpr int32_t kMassLooks = 8;
inline constexpr int32_t kMassRows = 1024;
// At the end of a prompt every head is looked at, with fewer rows of each.
inline constexpr int32_t kFirstMassRows = 256;

// Whether the step of this context looks at heads.
CLO_MIX_INLINE bool looks_at_some(int64_t context_tokens) {
  return context_tokens % kMassPeriod == 0;
}
// The head (layer * num_kv_heads + kv_head) that look `look` in [0, kMassLooks) of such a step
// takes: every head has its turn before one has it again, in another order each time. Looks of one
// step may meet at the same head, where a round ends in it.
CLO_MIX_INLINE int32_t head_looked_at(int64_t context_tokens, int32_t look, int32_t num_heads) {
  const uint32_t count = static_cast<uint32_t>(num_heads);
  const uint32_t at = static_cast<uint32_t>(context_tokens / kMassPeriod) * kMassLooks +
                      static_cast<uint32_t>(look);
  const uint32_t round = at / count, place = at % count;
  const uint64_t bits = mix_bits(kSplitMixStep * (uint64_t{round} + 1));
  // A prime above every number of heads shares no divisor with it, so that strides visit all.
  constexpr uint32_t kStrides[8] = {1000003, 1300021, 1600033, 1900009,
                                    2200013, 2500009, 2800001, 3100007};
  const uint64_t stride = kStrides[bits & 7u];
  return static_cast<int32_t>((place * stride + (bits >> 32)) % count);
}
CLO_MIX_INLINE bool is_looked_at(int64_t context_tokens, int32_t head, int32_t num_heads) {
  if (!looks_at_some(context_tokens)) return false;
  for (int32_t look = 0; look < kMassLooks; ++look) {
    if (head_looked_at(context_tokens, look, num_heads) == head) return true;
  }
  return false;
}

// Token number `number` of a draw from [first, first + count), with replacement. A token that the
// head did attend to is drawn again: with the next `attempt`.
CLO_MIX_INLINE int64_t drawn_token(int64_t context_tokens, int32_t head, int32_t number,
                                   uint32_t attempt, int64_t first, int64_t count) {
  const uint64_t of_head = mix_bits((static_cast<uint64_t>(context_tokens) << 24) ^
                                    static_cast<uint64_t>(static_cast<uint32_t>(head)));
  const uint64_t bits =
      mix_bits(of_head + kSplitMixStep * (uint64_t{static_cast<uint32_t>(number)} + 1) +
               0xD1B54A32D192ED03u * attempt);
  return first + static_cast<int64_t>(((bits >> 32) * static_cast<uint64_t>(count)) >> 32);
}

}  // namespace clo
