#include "eval/html_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include "base/units.h"
#include "eval/charts.h"
#include "eval/html_style.h"

namespace clo {

namespace {

std::string percent(bool is_there, double share) {
  return is_there ? one_digit(100 * share) + " %" : "–";
}

std::string signed_points(double value) { return (value > 0 ? "+" : "") + one_digit(value); }

std::string range_of(const std::optional<Interval>& interval) {
  if (!interval) return "–";
  return signed_points(interval->low) + " to " + signed_points(interval->high);
}

// The column of a difference: coloured when its interval leaves zero out.
std::string difference_cell(double value, const std::optional<Interval>& interval) {
  const bool bad = interval && interval->high < 0, good = interval && interval->low > 0;
  return std::string("<td class=\"") +
         (bad    ? "bad"
          : good ? "good"
                 : "") +
         "\">" + signed_points(value) + "</td><td>" + range_of(interval) + "</td>";
}

class Page {
 public:
  explicit Page(const HtmlInput& input) : in_(input) {}

  std::string build() {
    head();
    tiles();
    maps();
    score_curves();
    if (in_.suite == "position") gold_curves();
    scatter();
    layers();
    figures();
    table();
    return out_ + "</main></body></html>\n";
  }

 private:
  using Means = std::map<std::pair<std::string, std::string>, std::pair<double, int64_t>>;

  void head() {
    const std::string title = escape_html("clo eval " + in_.suite);
    out_ =
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta "
        "name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>" +
        title + "</title><style>" + std::string(kPageStyle) + "</style></head><body><main>\n<h1>" +
        title + "</h1>\n<p class=\"sub\">" + escape_html(in_.model) + ", " +
        std::to_string(in_.records->size()) +
        " items, each densely and under every policy</p>\n<dl>";
    for (const auto& [name, value] : in_.facts) {
      out_ += "<dt>" + escape_html(name) + "</dt><dd>" + escape_html(value) + "</dd>";
    }
    out_ += "</dl>\n";
  }

  void tiles() {
    out_ += "<h2>Policies</h2>\n<div class=\"tiles\">";
    for (size_t p = 0; p < in_.policies.size(); ++p) {
      std::vector<double> dense, scores;
      KvCounters counters;
      int64_t steps = 0;
      double bytes = 0;
      for (const ItemRecord& record : *in_.records) {
        const PolicyRecord& result = record.results.at(in_.policies[p]);
        dense.push_back(record.dense().score);
        scores.push_back(result.score);
        counters += result.counters;
        steps += result.decode_steps;
        bytes += static_cast<double>(result.counters.rows_fetched * result.row_bytes);
      }
      const PairedMean mean = paired_mean(dense, scores);
      out_ += "<div class=\"tile\" style=\"--mark:" + series_colour(p) + "\"><h3>" +
              escape_html(in_.policies[p]) + "</h3><b>" + one_digit(mean.second) + "</b>";
      if (p == 0) {
        out_ += "<p>mean score of all items</p><p>the reference</p></div>";
        continue;
      }
      out_ +=
          "<p>" + signed_points(mean.difference()) + " points (" + range_of(mean.interval) +
          ")</p><p>" +
          format_bytes(static_cast<int64_t>(steps == 0 ? 0 : bytes / static_cast<double>(steps))) +
          " fetched per token</p><p>hits " +
          percent(counters.decisions() > 0, counters.hit_rate()) + ", mass " +
          percent(counters.mass_samples > 0, counters.mean_mass_kept()) + ", evidence " +
          percent(counters.watched_rows > 0,
                  static_cast<double>(counters.watched_rows_attended) /
                      static_cast<double>(std::max<int64_t>(1, counters.watched_rows))) +
          "</p></div>";
    }
    out_ += "</div>\n";
  }

  // Mean of `value` over the records in each cell; a record without a value is left out.
  template <typename Row, typename Column, typename Value>
  void add_map(const std::string& title, const std::string& row_name,
               const std::string& column_name, const Row& row_of, const Column& column_of,
               const Value& value_of) {
    HeatMap map;
    map.title = title;
    map.row_name = row_name;
    map.column_name = column_name;
    Means means;
    for (const ItemRecord& record : *in_.records) {
      const std::optional<double> value = value_of(record);
      const std::string row = row_of(record), column = column_of(record);
      add_name(map.rows, row);
      add_name(map.columns, column);
      if (!value) continue;
      auto& [sum, count] = means[{row, column}];
      sum += *value;
      ++count;
    }
    for (const std::string& row : map.rows) {
      auto& values = map.values.emplace_back();
      for (const std::string& column : map.columns) {
        const auto found = means.find({row, column});
        values.push_back(found == means.end() ? std::optional<double>()
                                              : 100 * found->second.first /
                                                    static_cast<double>(found->second.second));
      }
    }
    if (!means.empty()) out_ += heat_map(map);
  }

  static void add_name(std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  static std::string context_of(const ItemRecord& record) { return std::to_string(record.context); }

  static std::optional<double> gold_of(const PolicyRecord& result) {
    if (result.counters.watched_rows == 0) return {};
    return static_cast<double>(result.counters.watched_rows_attended) /
           static_cast<double>(result.counters.watched_rows);
  }

  void maps() {
    out_ += "<h2>Scores</h2>\n<div class=\"charts\">";
    const bool grid = in_.suite == "niah";
    const auto depth_of = [](const ItemRecord& record) {
      std::string text = one_digit(100 * record.numbers.at("depth"));
      if (text.ends_with(".0")) text.resize(text.size() - 2);
      return text + " %";
    };
    const auto task_of = [](const ItemRecord& record) { return record.task; };
    for (const std::string& policy : in_.policies) {
      const auto score = [&](const ItemRecord& record) {
        return std::optional(record.results.at(policy).score);
      };
      if (grid) {
        add_map(policy, "depth", "context", depth_of, context_of, score);
      } else {
        add_map(policy, "task", "context", task_of, context_of, score);
      }
    }
    out_ += "</div>\n";
    const bool any_gold =
        std::any_of(in_.records->begin(), in_.records->end(), [&](const ItemRecord& record) {
          return std::any_of(record.results.begin(), record.results.end(),
                             [](const auto& result) { return gold_of(result.second).has_value(); });
        });
    if (!any_gold) return;
    out_ += "<h2>Share of the evidence's rows that was attended</h2>\n<div class=\"charts\">";
    for (const std::string& policy : in_.policies) {
      const auto gold = [&](const ItemRecord& record) {
        return gold_of(record.results.at(policy));
      };
      if (grid) {
        add_map(policy, "depth", "context", depth_of, context_of, gold);
      } else {
        add_map(policy, "task", "context", task_of, context_of, gold);
      }
    }
    out_ += "</div>\n";
  }

  // Where a curve puts an item: at its depth on a grid, else in the middle of its bin, of the
  // suite's bins or of ten.
  double place_of(const ItemRecord& record) const {
    const double depth = record.numbers.at("depth");
    if (in_.suite == "niah") return depth;
    const auto given = record.numbers.find("bins");
    const bool has_bins = given != record.numbers.end();
    const double count = has_bins ? given->second : 10;
    const double bin =
        has_bins ? record.numbers.at("bin") : std::min(count - 1, std::floor(depth * count));
    return (bin + 0.5) / count;
  }

  void score_curves() {
    const auto score = [](const PolicyRecord& result) { return std::pair(result.score, 1.0); };
    curves("By position", "score", score);
  }
  void gold_curves() {
    const auto gold = [](const PolicyRecord& result) {
      return std::pair(static_cast<double>(result.counters.watched_rows_attended),
                       static_cast<double>(result.counters.watched_rows));
    };
    curves("Evidence attended, by position", "share", gold);
  }

  // By the place of the evidence: 100 times the sum of parts over the sum of wholes. A policy
  // without wholes has no curve.
  template <typename Share>
  void curves(const std::string& heading, const std::string& y_name, const Share& share_of) {
    std::vector<std::string> tasks;
    for (const ItemRecord& record : *in_.records) {
      if (record.numbers.contains("depth")) add_name(tasks, record.task);
    }
    std::string charts;
    for (const std::string& task : tasks) {
      std::vector<Series> series;
      std::set<double> places;
      for (size_t p = 0; p < in_.policies.size(); ++p) {
        std::map<double, std::pair<double, double>> bins;
        for (const ItemRecord& record : *in_.records) {
          if (record.task != task || !record.numbers.contains("depth")) continue;
          const auto [part, whole] = share_of(record.results.at(in_.policies[p]));
          if (whole == 0) continue;
          auto& [parts, wholes] = bins[place_of(record)];
          parts += part;
          wholes += whole;
        }
        if (bins.empty()) continue;
        Series one{in_.policies[p], series_colour(p), p == 0, {}};
        for (const auto& [place, bin] : bins) {
          one.points.emplace_back(place, 100 * bin.first / bin.second);
          places.insert(place);
        }
        series.push_back(std::move(one));
      }
      if (places.size() > 1) charts += line_chart(task, y_name, series);
    }
    if (charts.empty()) return;
    out_ += "<h2>" + heading + "</h2>\n" + legend(in_.policies) + "<div class=\"charts\">" +
            charts + "</div>\n";
  }

  void scatter() {
    if (in_.policies.size() < 2) return;
    std::vector<Dot> dots;
    for (const SummaryRow& row : *in_.rows) {
      if (row.policy == kDenseName || row.task == "all") continue;
      const auto index = static_cast<size_t>(
          std::find(in_.policies.begin(), in_.policies.end(), row.policy) - in_.policies.begin());
      dots.push_back({row.bytes_per_token, -row.scores.difference(), series_colour(index),
                      row.policy + ", " + row.task + ", " + std::to_string(row.context) + ": " +
                          one_digit(-row.scores.difference()) + " points, " +
                          format_bytes(static_cast<int64_t>(row.bytes_per_token)) + " per token"});
    }
    out_ += "<h2>Loss against bytes moved</h2>\n" + legend(in_.policies) +
            "<div class=\"charts\">" + scatter_chart("Each dot is a task at a context", dots) +
            "</div>\n";
  }

  void layers() {
    HeatMap map;
    map.title = "Evidence attended, by layer";
    map.row_name = "policy";
    map.column_name = "layer";
    for (const std::string& policy : in_.policies) {
      std::vector<double> sums;
      int64_t items = 0;
      for (const ItemRecord& record : *in_.records) {
        const auto& layer_gold = record.results.at(policy).layer_gold;
        if (layer_gold.empty()) continue;
        sums.resize(std::max(sums.size(), layer_gold.size()));
        for (size_t i = 0; i < layer_gold.size(); ++i) sums[i] += layer_gold[i];
        ++items;
      }
      if (items == 0) continue;
      map.rows.push_back(policy);
      auto& values = map.values.emplace_back();
      for (const double sum : sums) values.emplace_back(100 * sum / static_cast<double>(items));
    }
    if (map.rows.empty()) return;
    size_t layers = 0;
    for (const auto& values : map.values) layers = std::max(layers, values.size());
    for (auto& values : map.values) values.resize(layers);
    for (size_t i = 0; i < layers; ++i) map.columns.push_back(std::to_string(i));
    out_ += "<h2>By layer</h2>\n<div class=\"charts\">" + heat_map(map) + "</div>\n";
  }

  void figures() {
    if (in_.figures->empty()) return;
    out_ +=
        "<h2>What this suite asks</h2>\n<div class=\"table\"><table><tr><th>context</th><th "
        "class=\"name\">task</th><th class=\"name\">policy</th><th class=\"name\">figure</th>"
        "<th>value</th><th>95 %</th><th class=\"name\"></th></tr>\n";
    for (const SuiteFigure& figure : *in_.figures) {
      const std::string value =
          figure.unit == FigureUnit::kDifference
              ? difference_cell(figure.value, figure.interval)
              : "<td>" + figure_value(figure) + "</td><td>" + figure_interval(figure) + "</td>";
      out_ += "<tr><td>" + (figure.context == 0 ? "all" : std::to_string(figure.context)) +
              "</td><td class=\"name\">" + escape_html(figure.task) + "</td><td class=\"name\">" +
              escape_html(figure.policy) + "</td><td class=\"name\">" + escape_html(figure.name) +
              "</td>" + value + "<td class=\"name\">" + escape_html(figure.note) + "</td></tr>\n";
    }
    out_ += "</table></div>\n";
  }

  void table() {
    out_ +=
        "<h2>All rows</h2>\n<div class=\"table\"><table><tr><th>context</th><th "
        "class=\"name\">task</th><th class=\"name\">policy</th><th>items</th><th>score</th>"
        "<th>dense</th><th>difference</th><th>95 %</th><th>hits</th><th>mass</th><th>evidence"
        "</th><th>cosine</th><th>read</th><th>bytes/token</th></tr>\n";
    for (const SummaryRow& row : *in_.rows) {
      const KvCounters& c = row.counters;
      char cosine[16];
      std::snprintf(cosine, sizeof cosine, "%.3f", c.mean_query_cosine());
      out_ += std::string("<tr") + (row.task == "all" ? " class=\"all\"" : "") + "><td>" +
              std::to_string(row.context) + "</td><td class=\"name\">" + escape_html(row.task) +
              "</td><td class=\"name\">" + escape_html(row.policy) + "</td><td>" +
              std::to_string(row.scores.items) + "</td><td>" + one_digit(row.scores.second) +
              "</td><td>" + one_digit(row.scores.first) + "</td>" +
              difference_cell(row.scores.difference(), row.scores.interval) + "<td>" +
              percent(c.decisions() > 0, c.hit_rate()) + "</td><td>" +
              percent(c.mass_samples > 0, c.mean_mass_kept()) + "</td><td>" +
              percent(row.has_gold(), row.gold_share()) + "</td><td>" +
              (c.query_cosine_samples > 0 ? cosine : "–") + "</td><td>" +
              percent(true, row.share_attended) + "</td><td>" +
              format_bytes(static_cast<int64_t>(row.bytes_per_token)) + "</td></tr>\n";
    }
    out_ += "</table></div>\n";
  }

  const HtmlInput& in_;
  std::string out_;
};

}  // namespace

std::string html_report(const HtmlInput& input) { return Page(input).build(); }

}  // namespace clo
