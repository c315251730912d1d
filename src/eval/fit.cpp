#include "eval/fit.h"

#include <algorithm>

#include "base/try.h"

namespace clo {

Result<EvalItem> fit_item(const ItemCounter& count, const ItemMaker& make,
                          const FitLimits& limits) {
  struct Tried {
    int64_t units = 0, tokens = 0;
    EvalItem item;
  };
  const auto attempt = [&](int64_t units) -> Result<Tried> {
    Tried tried;
    tried.units = units;
    tried.item = make(units);
    CLO_ASSIGN(const int64_t tokens, count(tried.item));
    tried.tokens = tokens + tried.item.max_new_tokens + limits.reserve_tokens;
    return tried;
  };
  CLO_ASSIGN(Tried best, attempt(limits.least_units));
  const int64_t context = best.item.context;
  if (best.tokens > context) {
    return Error{ErrorCode::kBadRequest,
                 "needs " + std::to_string(best.tokens) +
                     " tokens for its shortest prompt and the answer, found --context " +
                     std::to_string(context),
                 best.item.id()};
  }
  // Twice the units until they do not fit, then in between, by interpolation: tokens grow nearly
  // linearly. Every third try halves the range, so that a bad guess costs little.
  int64_t too_many = limits.most_units;
  bool bounded = false;
  int64_t too_many_tokens = 0;
  for (int64_t step = 16; best.units < limits.most_units; step *= 2) {
    const int64_t units =
        step > limits.most_units - best.units ? limits.most_units : best.units + step;
    CLO_ASSIGN(Tried tried, attempt(units));
    if (tried.tokens > context) {
      too_many = units;
      too_many_tokens = tried.tokens;
      bounded = true;
      break;
    }
    best = std::move(tried);
  }
  if (!bounded) return std::move(best.item);
  for (int tries = 1; too_many - best.units > 1; ++tries) {
    const double share = static_cast<double>(context - best.tokens) /
                         static_cast<double>(std::max<int64_t>(1, too_many_tokens - best.tokens));
    const int64_t range = too_many - best.units;
    const auto guess =
        tries % 3 == 0 ? range / 2 : static_cast<int64_t>(share * static_cast<double>(range));
    CLO_ASSIGN(Tried tried, attempt(best.units + std::clamp<int64_t>(guess, 1, range - 1)));
    if (tried.tokens > context) {
      too_many = tried.units;
      too_many_tokens = tried.tokens;
    } else {
      best = std::move(tried);
    }
  }
  return std::move(best.item);
}

}  // namespace clo
