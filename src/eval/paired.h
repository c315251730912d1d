#pragma once
// What paired outcomes say: the same items under two policies.
#include <cstdint>

namespace clo {

struct PairedCounts {
  int64_t items = 0;
  int64_t both = 0;    // right under both
  int64_t lost = 0;    // right under the first only
  int64_t gained = 0;  // right under the second only

  int64_t first_right() const { return both + lost; }
  int64_t second_right() const { return both + gained; }
  void add(bool first, bool second);
};

struct Interval {
  double low = 0;
  double high = 0;
};

// 95 % interval of the difference of two paired proportions, second - first, in points of 100
// (Agresti and Min, 2005: the Wald interval after adding 0.5 to each of the four cells).
Interval paired_difference(const PairedCounts& counts);

}  // namespace clo
