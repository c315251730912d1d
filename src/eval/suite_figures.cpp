#include "eval/suite_figures.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "eval/suite_summary.h"
#include "eval/suites.h"

namespace clo {

namespace {

using Group = std::vector<const ItemRecord*>;

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

// Scores of the first and of the second items, averaged over each pair key, for the keys that have
// both.
template <typename First, typename Second, typename Key>
PairedMean compare(const Group& first_items, const Group& second_items, const First& first_score,
                   const Second& second_score, const Key& key_of,
                   PairedMean (*mean_of)(const std::vector<double>&,
                                         const std::vector<double>&) = paired_mean) {
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
  return mean_of(a, b);
}

Group with_label(const Group& items, const std::string& label, const std::string& value) {
  Group chosen;
  for (const ItemRecord* item : items) {
    const auto found = item->labels.find(label);
    if (found != item->labels.end() && found->second == value) chosen.push_back(item);
  }
  return chosen;
}

void add_level(std::vector<SuiteFigure>& figures, const SuiteFigure& where, const std::string& name,
               double value, FigureUnit unit = FigureUnit::kPoints) {
  SuiteFigure figure = where;
  figure.name = name;
  figure.value = value;
  figure.unit = unit;
  figures.push_back(figure);
}

void add_difference(std::vector<SuiteFigure>& figures, const SuiteFigure& where,
                    const std::string& name, const PairedMean& compared) {
  if (compared.items == 0) return;
  SuiteFigure figure = where;
  figure.name = name;
  figure.value = compared.difference();
  figure.interval = compared.interval;
  figures.push_back(figure);
}

// Positions by their means, in points: how good, how uneven.
void add_spread(std::vector<SuiteFigure>& figures, const SuiteFigure& where,
                const std::string& what, const std::vector<double>& means) {
  const double average = mean(means);
  double squares = 0;
  for (const double value : means) squares += (value - average) * (value - average);
  const auto [least, most] = std::minmax_element(means.begin(), means.end());
  add_level(figures, where, what + "average over bins", average);
  add_level(figures, where, what + "largest gap of bins", *most - *least);
  // Of these positions, not of positions drawn from more.
  add_level(figures, where, what + "standard deviation over bins",
            std::sqrt(squares / static_cast<double>(means.size())));
}

void add_bins(std::vector<SuiteFigure>& figures, const SuiteFigure& where, const Group& items) {
  struct Bin {
    std::vector<double> scores;
    KvCounters counters;
  };
  std::map<double, Bin> bins;
  for (const ItemRecord* item : items) {
    const PolicyRecord& result = item->results.at(where.policy);
    Bin& bin = bins[item->numbers.at("bin")];
    bin.scores.push_back(result.score);
    bin.counters += result.counters;
  }
  std::vector<double> scores, gold;
  for (const auto& [place, bin] : bins) {
    scores.push_back(100 * mean(bin.scores));
    if (bin.counters.watched_rows == 0) continue;
    gold.push_back(100 * static_cast<double>(bin.counters.watched_rows_attended) /
                   static_cast<double>(bin.counters.watched_rows));
  }
  add_spread(figures, where, "", scores);
  // A bin without a decode step would be missing from the spread.
  if (gold.size() == bins.size()) add_spread(figures, where, "gold: ", gold);
}

// Adjacent and separated evidence, by what attention did: means of each, and the difference within
// worlds.
template <typename Value, typename Key>
void add_layouts(std::vector<SuiteFigure>& figures, const SuiteFigure& where,
                 const std::string& what, const Group& items, const Value& value_of,
                 const Key& key_of) {
  Group measured;
  for (const ItemRecord* item : items) {
    if (value_of(*item)) measured.push_back(item);
  }
  const auto value = [&](const ItemRecord& item) { return *value_of(item); };
  const PairedMean pairs =
      compare(with_label(measured, "layout", "adjacent"),
              with_label(measured, "layout", "separated"), value, value, key_of, paired_numbers);
  if (pairs.items == 0) return;
  add_level(figures, where, what + ", adjacent", pairs.first, FigureUnit::kNumber);
  add_level(figures, where, what + ", separated", pairs.second, FigureUnit::kNumber);
  add_difference(figures, where, what + ", separated - adjacent", pairs);
  figures.back().unit = FigureUnit::kNumberDifference;
}

template <typename Key>
void add_sets(std::vector<SuiteFigure>& figures, const SuiteFigure& where, const Group& items,
              const Key& key_of) {
  const auto overlap = [&](const ItemRecord& item) -> std::optional<double> {
    const auto& sets = item.results.at(where.policy).sets;
    if (!sets || sets->overlaps == 0) return {};
    return sets->mean_overlap();
  };
  const auto modes = [&](const ItemRecord& item) -> std::optional<double> {
    const auto& sets = item.results.at(where.policy).sets;
    if (!sets || sets->modes == 0) return {};
    return sets->mean_modes();
  };
  add_layouts(figures, where, "set overlap", items, overlap, key_of);
  add_layouts(figures, where, "modes", items, modes, key_of);
}

// Weights 1, 2, ... by the rank of the length, as published.
double ranked_mean(const std::vector<double>& values) {
  double sum = 0, weights = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    sum += static_cast<double>(i + 1) * values[i];
    weights += static_cast<double>(i + 1);
  }
  return sum / weights;
}

void add_ruler(std::vector<SuiteFigure>& figures, const std::vector<ItemRecord>& records,
               const std::string& policy) {
  std::map<int64_t, std::map<std::string, std::vector<double>>> scores;
  size_t most_tasks = 0;
  for (const ItemRecord& record : records) {
    auto& of_tasks = scores[record.context];
    of_tasks[record.task].push_back(record.results.at(policy).score);
    most_tasks = std::max(most_tasks, of_tasks.size());
  }
  std::vector<double> averages;  // by length
  int64_t effective = 0;
  bool even = true;
  for (const auto& [context, of_tasks] : scores) {
    std::vector<double> tasks;
    for (const auto& [task, of_task] : of_tasks) tasks.push_back(100 * mean(of_task));
    averages.push_back(mean(tasks));
    even = even && tasks.size() == most_tasks;
    if (averages.back() >= kRulerThreshold) effective = context;
  }
  if (averages.empty()) return;
  const size_t all_tasks = find_suite("ruler")->tasks.size();
  SuiteFigure where{"all", 0, policy, "", 0, {}, FigureUnit::kTokens, ""};
  if (most_tasks < all_tasks || !even) {
    where.note = "of " + std::to_string(most_tasks) + " of " + std::to_string(all_tasks) +
                 " tasks: not RULER's figure";
  }
  SuiteFigure length = where;
  length.name = "effective length";
  length.value = static_cast<double>(effective);
  const auto remark = [&](const std::string& text) {
    length.note += (length.note.empty() ? "" : "; ") + text;
  };
  if (effective == 0) remark("no length of this run reaches 85.6");
  if (effective == scores.rbegin()->first) remark("the longest of this run");
  figures.push_back(length);
  add_level(figures, where, "Avg.", mean(averages));
  add_level(figures, where, "wAvg. (inc)", ranked_mean(averages));
  add_level(figures, where, "wAvg. (dec)", ranked_mean({averages.rbegin(), averages.rend()}));
}

// Over the items whose evidence was asked for.
void add_recitations(std::vector<SuiteFigure>& figures, const SuiteFigure& where,
                     const Group& items) {
  std::vector<double> exact, sentences, tokens, scores;
  for (const ItemRecord* item : items) {
    const PolicyRecord& result = item->results.at(where.policy);
    if (!result.recitation) continue;
    exact.push_back(result.recitation->exact);
    sentences.push_back(result.recitation->sentences);
    tokens.push_back(result.recitation->tokens);
    if (result.recitation->exact) scores.push_back(result.score);
  }
  if (exact.empty()) return;
  add_level(figures, where, "evidence recited exactly", 100 * mean(exact));
  add_level(figures, where, "evidence sentences recited", 100 * mean(sentences));
  add_level(figures, where, "evidence tokens recited", 100 * mean(tokens));
  if (!scores.empty()) add_level(figures, where, "score where exactly recited", 100 * mean(scores));
}

}  // namespace

std::string_view unit_name(FigureUnit unit) {
  switch (unit) {
    case FigureUnit::kDifference:
      return "difference";
    case FigureUnit::kPoints:
      return "points";
    case FigureUnit::kTokens:
      return "tokens";
    case FigureUnit::kNumber:
      return "number";
    case FigureUnit::kNumberDifference:
      return "number_difference";
  }
  return "unknown";
}

std::string figure_value(const SuiteFigure& figure) {
  if (figure.unit == FigureUnit::kTokens) {
    return figure.value == 0 ? "none" : std::to_string(static_cast<int64_t>(figure.value));
  }
  const char* format = figure.unit == FigureUnit::kDifference ? "%+.1f"
                       : figure.unit == FigureUnit::kPoints   ? "%.1f"
                       : figure.unit == FigureUnit::kNumber   ? "%.3f"
                                                              : "%+.3f";
  char text[64];
  std::snprintf(text, sizeof text, format, figure.value);
  return text;
}

std::string figure_interval(const SuiteFigure& figure) {
  if (!figure.interval) return "-";
  const bool fine = figure.unit == FigureUnit::kNumberDifference;
  char text[64];
  std::snprintf(text, sizeof text, fine ? "%+.3f to %+.3f" : "%+.1f to %+.1f", figure.interval->low,
                figure.interval->high);
  return text;
}

std::vector<SuiteFigure> suite_figures(const std::string& suite,
                                       const std::vector<ItemRecord>& records,
                                       const std::vector<std::string>& policies) {
  std::vector<SuiteFigure> figures;
  std::map<std::pair<int64_t, std::string>, Group> groups;
  for (const ItemRecord& record : records) groups[{record.context, record.task}].push_back(&record);
  if (suite == "ruler") {
    for (const std::string& policy : policies) add_ruler(figures, records, policy);
  }
  const auto index = [](const ItemRecord& item) { return item.index; };
  for (const auto& [place, items] : groups) {
    for (const std::string& policy : policies) {
      const SuiteFigure where{place.second, place.first, policy, "", 0, {}, {}, ""};
      const auto score = [&](const ItemRecord& item) { return item.results.at(policy).score; };
      const auto dense = [](const ItemRecord& item) { return item.dense().score; };
      if (suite == "position") add_bins(figures, where, items);
      add_recitations(figures, where, items);
      if (suite == "multihop") {
        const auto world = [](const ItemRecord& item) {
          return static_cast<int64_t>(item.numbers.at("world"));
        };
        add_difference(figures, where, "separated - adjacent",
                       compare(with_label(items, "layout", "adjacent"),
                               with_label(items, "layout", "separated"), score, score, world));
        add_difference(figures, where, "reversed - forward",
                       compare(with_label(items, "order", "forward"),
                               with_label(items, "order", "reversed"), score, score, world));
        add_sets(figures, where, items, world);
      }
      if (suite == "length" && place.second != "none") {
        const auto bare = groups.find({place.first, "none"});
        if (bare == groups.end()) continue;
        // A: dense without filler; B: dense with it; C: the policy with it.
        if (policy == kDenseName) {
          add_difference(figures, where, "length loss of dense (B - A)",
                         compare(bare->second, items, dense, dense, index));
          continue;
        }
        add_difference(figures, where, "loss to dense (C - B)",
                       compare(items, items, dense, score, index));
        add_difference(figures, where, "whole loss (C - A)",
                       compare(bare->second, items, dense, score, index));
      }
    }
  }
  return figures;
}

}  // namespace clo
