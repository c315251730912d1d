#pragma once
// Which heads of a sequence are looked at in a step to keep its dial, and which of the rows that
// they left out. The same draws for every sequence, so that an answer depends on its request alone.
#include <cstdint>
#include <span>
#include <vector>

#include "kv/head_cache.h"
#include "ops/token_mask.h"
#include "reuse/dial.h"

namespace clo {

class MassSampler {
 public:
  // Heads looked at in a decode step, and rows drawn of those that such a head left out. A head
  // with all rows on the device is looked at whole.
  static constexpr int32_t kHeadsAtOnce = 2;
  static constexpr int32_t kRows = 1024;
  // At the end of a prompt every head is looked at, with fewer rows of each.
  static constexpr int32_t kFirstRows = 256;

  MassSampler(Dial dial, int64_t num_heads);

  Dial& dial() { return dial_; }
  const Dial& dial() const { return dial_; }
  // The heads of the next step: every head has its turn before one has it again, in an order drawn
  // anew each time.
  void begin_step();
  // head: layer * num_kv_heads + kv_head.
  bool is_looked_at(int64_t head) const;

  // Visible tokens of a context that an evictable head did not attend to: `num_rows` of them drawn
  // with replacement, or all where there are no more. mask: null for none. num_outside: how many
  // there are.
  void draw_rows(const HeadCacheView& head, const TokenMask* mask, int64_t context_tokens,
                 int64_t num_outside, int32_t num_rows, std::vector<int32_t>& tokens);

 private:
  Dial dial_;
  std::vector<int32_t> order_;
  size_t at_ = 0;
  std::vector<int32_t> now_;
  uint64_t state_ = 0x6469616C;
};

}  // namespace clo
