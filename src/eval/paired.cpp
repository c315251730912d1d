#include "eval/paired.h"

#include <algorithm>
#include <cmath>

namespace clo {

void PairedCounts::add(bool first, bool second) {
  ++items;
  both += first && second;
  lost += first && !second;
  gained += !first && second;
}

Interval paired_difference(const PairedCounts& counts) {
  constexpr double kZ = 1.959963984540054;  // two-sided 95 %
  const double n = static_cast<double>(counts.items) + 2;
  const double lost = (static_cast<double>(counts.lost) + 0.5) / n;
  const double gained = (static_cast<double>(counts.gained) + 0.5) / n;
  const double difference = gained - lost;
  const double deviation = std::sqrt((gained + lost - difference * difference) / n);
  return {100 * std::max(-1.0, difference - kZ * deviation),
          100 * std::min(1.0, difference + kZ * deviation)};
}

}  // namespace clo
