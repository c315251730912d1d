#include "eval/suite_summary.h"

#include <algorithm>
#include <map>

#include "eval/random.h"

namespace clo {

namespace {

constexpr int kDraws = 2000;
// Draws from fewer items say less than they seem to.
constexpr size_t kLeastDrawn = 5;

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

bool is_binary(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return x == 0 || x == 1; });
}

// Percentiles of the mean of as many draws with replacement.
Interval bootstrap(const std::vector<double>& differences) {
  ItemRandom random(differences.size());
  std::vector<double> means;
  for (int d = 0; d < kDraws; ++d) {
    double sum = 0;
    for (size_t i = 0; i < differences.size(); ++i) {
      sum += differences[random.below(differences.size())];
    }
    means.push_back(sum / static_cast<double>(differences.size()));
  }
  std::sort(means.begin(), means.end());
  return {means[kDraws / 40], means[kDraws - 1 - kDraws / 40]};
}

SummaryRow make_row(std::string task, int64_t context, const std::string& policy,
                    const std::vector<const ItemRecord*>& items) {
  SummaryRow row;
  row.task = std::move(task);
  row.context = context;
  row.policy = policy;
  std::vector<double> dense, scores;
  double bytes = 0;
  for (const ItemRecord* item : items) {
    const auto found = item->results.find(policy);
    if (found == item->results.end()) continue;
    const PolicyRecord& result = found->second;
    dense.push_back(item->dense().score);
    scores.push_back(result.score);
    row.counters += result.counters;
    row.steps += result.decode_steps;
    bytes += static_cast<double>(result.counters.rows_fetched * result.row_bytes);
  }
  row.scores = paired_mean(dense, scores);
  if (policy == kDenseName) row.scores.interval.reset();  // with itself there is nothing to doubt
  if (row.steps > 0) row.bytes_per_token = bytes / static_cast<double>(row.steps);
  if (row.counters.rows_in_context > 0) {
    row.share_attended = static_cast<double>(row.counters.rows_attended) /
                         static_cast<double>(row.counters.rows_in_context);
  }
  return row;
}

}  // namespace

double SummaryRow::gold_share() const {
  return has_gold() ? static_cast<double>(counters.watched_rows_attended) /
                          static_cast<double>(counters.watched_rows)
                    : 0;
}

PairedMean paired_numbers(const std::vector<double>& first, const std::vector<double>& second) {
  PairedMean result;
  result.items = std::ssize(first);
  result.first = mean(first);
  result.second = mean(second);
  if (first.size() < kLeastDrawn) return result;
  std::vector<double> differences;
  for (size_t i = 0; i < first.size(); ++i) differences.push_back(second[i] - first[i]);
  result.interval = bootstrap(differences);
  return result;
}

PairedMean paired_mean(const std::vector<double>& first, const std::vector<double>& second) {
  if (first.size() >= 2 && is_binary(first) && is_binary(second)) {
    PairedCounts counts;
    for (size_t i = 0; i < first.size(); ++i) counts.add(first[i] == 1, second[i] == 1);
    return {std::ssize(first), 100 * mean(first), 100 * mean(second), paired_difference(counts)};
  }
  PairedMean result = paired_numbers(first, second);
  result.first *= 100;
  result.second *= 100;
  if (result.interval) result.interval = {100 * result.interval->low, 100 * result.interval->high};
  return result;
}

std::vector<SummaryRow> summarise(const std::vector<ItemRecord>& records,
                                  const std::vector<std::string>& policies) {
  // Tasks in the order they were run.
  std::vector<std::string> tasks;
  std::map<int64_t, std::map<std::string, std::vector<const ItemRecord*>>> groups;
  for (const ItemRecord& record : records) {
    if (std::find(tasks.begin(), tasks.end(), record.task) == tasks.end()) {
      tasks.push_back(record.task);
    }
    groups[record.context][record.task].push_back(&record);
  }
  std::vector<SummaryRow> rows;
  for (const auto& [context, by_task] : groups) {
    std::vector<const ItemRecord*> all;
    for (const std::string& task : tasks) {
      const auto found = by_task.find(task);
      if (found == by_task.end()) continue;
      for (const std::string& policy : policies) {
        rows.push_back(make_row(task, context, policy, found->second));
      }
      all.insert(all.end(), found->second.begin(), found->second.end());
    }
    if (by_task.size() < 2) continue;
    for (const std::string& policy : policies) {
      rows.push_back(make_row("all", context, policy, all));
    }
  }
  return rows;
}

}  // namespace clo
