#include "suite_table.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/units.h"

namespace clo::app {

namespace {

std::string range_of(const std::optional<Interval>& interval) {
  if (!interval) return "-";
  char text[64];
  std::snprintf(text, sizeof text, "%+.1f to %+.1f", interval->low, interval->high);
  return text;
}

nlohmann::json interval_json(const std::optional<Interval>& interval) {
  if (!interval) return nullptr;
  return {interval->low, interval->high};
}

std::string percent_or_dash(bool is_there, double share) {
  if (!is_there) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.1f%%", 100 * share);
  return text;
}

}  // namespace

void print_summary(const std::vector<SummaryRow>& rows, const std::vector<SuiteFigure>& figures) {
  int task_width = 4, policy_width = 6;
  for (const SummaryRow& row : rows) {
    task_width = std::max(task_width, static_cast<int>(row.task.size()));
    policy_width = std::max(policy_width, static_cast<int>(row.policy.size()));
  }
  std::printf("%8s  %-*s  %-*s %5s %6s %6s %6s  %-16s %6s %6s %6s %6s %10s\n", "context",
              task_width, "task", policy_width, "policy", "items", "score", "dense", "diff", "95 %",
              "hits", "mass", "gold", "read", "bytes/tok");
  for (const SummaryRow& row : rows) {
    const KvCounters& c = row.counters;
    std::printf("%8ld  %-*s  %-*s %5ld %6.1f %6.1f %+6.1f  %-16s %6s %6s %6s %6s %10s\n",
                static_cast<long>(row.context), task_width, row.task.c_str(), policy_width,
                row.policy.c_str(), static_cast<long>(row.scores.items), row.scores.second,
                row.scores.first, row.scores.difference(), range_of(row.scores.interval).c_str(),
                percent_or_dash(c.decisions() > 0, c.hit_rate()).c_str(),
                percent_or_dash(c.mass_samples > 0, c.mean_mass_kept()).c_str(),
                percent_or_dash(row.has_gold(), row.gold_share()).c_str(),
                percent_or_dash(true, row.share_attended).c_str(),
                format_bytes(static_cast<int64_t>(row.bytes_per_token)).c_str());
  }
  if (!figures.empty()) std::printf("\n");
  for (const SuiteFigure& figure : figures) {
    std::printf("%8s  %-*s  %-*s %-34s %7s  %s%s%s\n",
                figure.context == 0 ? "all" : std::to_string(figure.context).c_str(), task_width,
                figure.task.c_str(), policy_width, figure.policy.c_str(), figure.name.c_str(),
                figure_value(figure).c_str(), figure_interval(figure).c_str(),
                figure.note.empty() ? "" : "  ", figure.note.c_str());
  }
  std::fflush(stdout);
}

std::vector<std::string> summary_lines(const std::string& suite,
                                       const std::vector<SummaryRow>& rows,
                                       const std::vector<SuiteFigure>& figures) {
  std::vector<std::string> lines;
  for (const SummaryRow& row : rows) {
    const KvCounters& c = row.counters;
    lines.push_back(nlohmann::json{{"kind", "summary"},
                                   {"suite", suite},
                                   {"task", row.task},
                                   {"context", row.context},
                                   {"policy", row.policy},
                                   {"items", row.scores.items},
                                   {"score", row.scores.second},
                                   {"dense_score", row.scores.first},
                                   {"difference_points", row.scores.difference()},
                                   {"interval_95", interval_json(row.scores.interval)},
                                   {"hit_rate", c.hit_rate()},
                                   {"mass_kept", c.mean_mass_kept()},
                                   {"query_cosine", c.mean_query_cosine()},
                                   {"gold_share", row.gold_share()},
                                   {"share_attended", row.share_attended},
                                   {"bytes_fetched_per_token", row.bytes_per_token}}
                        .dump());
  }
  for (const SuiteFigure& figure : figures) {
    lines.push_back(nlohmann::json{
        {"kind", "figure"},
        {"suite", suite},
        {"task", figure.task},
        {"context", figure.context},
        {"policy", figure.policy},
        {"name", figure.name},
        {"value", figure.value},
        {"unit", unit_name(figure.unit)},
        {"interval_95", interval_json(figure.interval)},
        {"note",
         figure.note}}.dump());
  }
  return lines;
}

}  // namespace clo::app
