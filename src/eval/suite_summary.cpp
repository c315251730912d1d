#include "eval/suite_summary.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

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
    means.push_back(100 * sum / static_cast<double>(differences.size()));
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

PairedMean paired_mean(const std::vector<double>& first, const std::vector<double>& second) {
  PairedMean result;
  result.items = std::ssize(first);
  result.first = 100 * mean(first);
  result.second = 100 * mean(second);
  if (first.size() < 2) return result;
  if (is_binary(first) && is_binary(second)) {
    PairedCounts counts;
    for (size_t i = 0; i < first.size(); ++i) counts.add(first[i] == 1, second[i] == 1);
    result.interval = paired_difference(counts);
    return result;
  }
  if (first.size() < kLeastDrawn) return result;
  std::vector<double> differences;
  for (size_t i = 0; i < first.size(); ++i) differences.push_back(second[i] - first[i]);
  result.interval = bootstrap(differences);
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

namespace {

using Group = std::vector<const ItemRecord*>;

// Scores of the items that `is_first` and those that `is_second` accept, averaged over each pair
// key, for the keys that have both.
template <typename First, typename Second, typename Key>
PairedMean compare(const Group& first_items, const Group& second_items, const First& first_score,
                   const Second& second_score, const Key& key_of) {
  std::map<int64_t, std::vector<double>> first, second;
  for (const ItemRecord* item : first_items) first[key_of(*item)].push_back(first_score(*item));
  for (const ItemRecord* item : second_items) second[key_of(*item)].push_back(second_score(*item));
  std::vector<double> a, b;
  for (const auto& [key, scores] : first) {
    const auto found = second.find(key);
    if (found == second.end()) continue;
    a.push_back(mean(scores));
    b.push_back(mean(found->second));
  }
  return paired_mean(a, b);
}

Group with_label(const Group& items, const std::string& label, const std::string& value) {
  Group chosen;
  for (const ItemRecord* item : items) {
    const auto found = item->labels.find(label);
    if (found != item->labels.end() && found->second == value) chosen.push_back(item);
  }
  return chosen;
}

void add(std::vector<SuiteFigure>& figures, const SuiteFigure& where, const std::string& name,
         const PairedMean& compared) {
  if (compared.items == 0) return;
  SuiteFigure figure = where;
  figure.name = name;
  figure.value = compared.difference();
  figure.interval = compared.interval;
  figures.push_back(figure);
}

void add_bins(std::vector<SuiteFigure>& figures, const SuiteFigure& where, const Group& items) {
  std::map<double, std::vector<double>> bins;
  for (const ItemRecord* item : items) {
    bins[item->numbers.at("bin")].push_back(item->results.at(where.policy).score);
  }
  std::vector<double> means;
  for (const auto& [bin, scores] : bins) means.push_back(100 * mean(scores));
  const auto [least, most] = std::minmax_element(means.begin(), means.end());
  SuiteFigure figure = where;
  figure.name = "average over bins";
  figure.value = mean(means);
  figures.push_back(figure);
  figure.name = "largest gap of bins";
  figure.value = *most - *least;
  figures.push_back(figure);
}

}  // namespace

std::vector<SuiteFigure> suite_figures(const std::string& suite,
                                       const std::vector<ItemRecord>& records,
                                       const std::vector<std::string>& policies) {
  std::vector<SuiteFigure> figures;
  std::map<std::pair<int64_t, std::string>, Group> groups;
  for (const ItemRecord& record : records) groups[{record.context, record.task}].push_back(&record);
  const auto index = [](const ItemRecord& item) { return item.index; };
  for (const auto& [place, items] : groups) {
    for (const std::string& policy : policies) {
      const SuiteFigure where{place.second, place.first, policy, "", 0, {}};
      const auto score = [&](const ItemRecord& item) { return item.results.at(policy).score; };
      const auto dense = [](const ItemRecord& item) { return item.dense().score; };
      if (suite == "position") add_bins(figures, where, items);
      if (suite == "multihop") {
        const auto world = [](const ItemRecord& item) {
          return static_cast<int64_t>(item.numbers.at("world"));
        };
        add(figures, where, "separated - adjacent",
            compare(with_label(items, "layout", "adjacent"),
                    with_label(items, "layout", "separated"), score, score, world));
        add(figures, where, "reversed - forward",
            compare(with_label(items, "order", "forward"), with_label(items, "order", "reversed"),
                    score, score, world));
      }
      if (suite == "length" && place.second != "none") {
        const auto bare = groups.find({place.first, "none"});
        if (bare == groups.end()) continue;
        // A: dense without filler; B: dense with it; C: the policy with it.
        if (policy == kDenseName) {
          add(figures, where, "length loss of dense (B - A)",
              compare(bare->second, items, dense, dense, index));
          continue;
        }
        add(figures, where, "loss to dense (C - B)", compare(items, items, dense, score, index));
        add(figures, where, "whole loss (C - A)",
            compare(bare->second, items, dense, score, index));
      }
    }
  }
  return figures;
}

}  // namespace clo
