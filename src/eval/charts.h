#pragma once
// Charts as SVG text, for a page that needs nothing from elsewhere. Colours of text and lines are
// CSS variables of the page (eval/html_report.cpp), so that they follow a dark or light screen.
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace clo {

// Text for HTML and its attributes.
std::string escape_html(std::string_view text);
// One digit after the point.
std::string one_digit(double value);
// The colour of the policy at this place in the list; the first is dense's.
std::string series_colour(size_t index);

struct HeatMap {
  std::string title;
  std::string column_name, row_name;
  std::vector<std::string> columns, rows;
  std::vector<std::vector<std::optional<double>>> values;  // [row][column], 0 to 100
};
std::string heat_map(const HeatMap& map);

struct Series {
  std::string name, colour;
  bool dashed = false;
  std::vector<std::pair<double, double>> points;  // x in [0, 1], y in [0, 100]
};
// Curves over the context, from its start to its end.
std::string line_chart(const std::string& title, const std::string& y_name,
                       const std::vector<Series>& series);

struct Dot {
  double bytes = 0, loss = 0;  // per token; points below dense
  std::string colour, tip;
};
std::string scatter_chart(const std::string& title, const std::vector<Dot>& dots);

// The names of series beside their colours.
std::string legend(const std::vector<std::string>& names);

}  // namespace clo
