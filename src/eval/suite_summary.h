#pragma once
// What a run's items say together: one row for each task, context and policy, and the figures that
// a suite is about.
#include <optional>
#include <string>
#include <vector>

#include "eval/paired.h"
#include "eval/suite_run.h"

namespace clo {

// The mean of paired differences with its 95 % interval, in points of 100. Scores that are all 0 or
// 1 have that of paired proportions (eval/paired.h), from two items on; others a percentile
// bootstrap of 2,000 draws, from five items on.
struct PairedMean {
  int64_t items = 0;
  double first = 0, second = 0;  // means, in points
  double difference() const { return second - first; }
  std::optional<Interval> interval;
};
// Requires: as many of one as of the other.
PairedMean paired_mean(const std::vector<double>& first, const std::vector<double>& second);
// Of numbers that are no scores, as they are and not times 100: always drawn.
PairedMean paired_numbers(const std::vector<double>& first, const std::vector<double>& second);

struct SummaryRow {
  std::string task;
  int64_t context = 0;  // 0: all together
  std::string policy;
  PairedMean scores;  // dense, policy
  KvCounters counters;
  int64_t steps = 0;
  double bytes_per_token = 0;
  double share_attended = 1;
  bool has_gold() const { return counters.watched_rows > 0; }
  double gold_share() const;  // of the evidence's rows, attended
};

// Rows by context, then task, then policy; after the tasks of a context their mean ("all"), where
// there are several.
std::vector<SummaryRow> summarise(const std::vector<ItemRecord>& records,
                                  const std::vector<std::string>& policies);

}  // namespace clo
