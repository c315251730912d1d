#pragma once
// Items as long as their context allows: the most units of filler with which prompt and answer fit.
#include <functional>
#include <limits>

#include "clo/result.h"
#include "eval/prompt.h"

namespace clo {

// The item with that many units of filler; the same for the same number.
using ItemMaker = std::function<EvalItem(int64_t units)>;

struct FitLimits {
  int64_t least_units = 0;
  int64_t most_units = std::numeric_limits<int64_t>::max();
  int64_t reserve_tokens = 0;  // kept free beside prompt and answer
};

// The item with the most units for which count(item) + max_new_tokens + reserve is at most its
// context. Fails: kBadRequest when the least does not fit; whatever `count` fails with.
Result<EvalItem> fit_item(const ItemCounter& count, const ItemMaker& make, const FitLimits& limits);

}  // namespace clo
