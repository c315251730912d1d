#include "eval/charts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/units.h"

namespace clo {

namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

struct Colour {
  double r, g, b;
};

// From pale sand over teal to deep blue: even steps in lightness, so that it reads without hues.
Colour scale_colour(double share) {
  constexpr std::array<Colour, 4> kStops = {
      Colour{250, 232, 208}, {150, 205, 178}, {46, 140, 152}, {14, 62, 102}};
  const double at = std::clamp(share, 0.0, 1.0) * (kStops.size() - 1);
  const auto low = std::min(static_cast<size_t>(at), kStops.size() - 2);
  const double part = at - static_cast<double>(low);
  const Colour &a = kStops[low], &b = kStops[low + 1];
  return {a.r + part * (b.r - a.r), a.g + part * (b.g - a.g), a.b + part * (b.b - a.b)};
}

std::string css(const Colour& c) {
  char text[48];
  std::snprintf(text, sizeof text, "rgb(%.0f,%.0f,%.0f)", c.r, c.g, c.b);
  return text;
}

// What is written on a cell of that colour.
std::string ink_on(const Colour& c) {
  return 0.299 * c.r + 0.587 * c.g + 0.114 * c.b > 140 ? "#1d2733" : "#ffffff";
}

class Svg {
 public:
  Svg(double width, double height) {
    out_ = "<svg viewBox=\"0 0 " + number(width) + " " + number(height) + "\" width=\"" +
           number(width) + "\" height=\"" + number(height) + "\" role=\"img\">";
  }
  void text(double x, double y, const std::string& what, const char* anchor,
            const std::string& fill = "var(--dim)", int size = 12) {
    out_ += "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor +
            "\" font-size=\"" + std::to_string(size) + "\" fill=\"" + fill + "\">" +
            escape_html(what) + "</text>";
  }
  void rect(double x, double y, double width, double height, const std::string& fill,
            const std::string& tip) {
    out_ += "<rect x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) +
            "\" height=\"" + number(height) + "\" rx=\"3\" fill=\"" + fill + "\"><title>" +
            escape_html(tip) + "</title></rect>";
  }
  void line(double x1, double y1, double x2, double y2) {
    out_ += "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) +
            "\" y2=\"" + number(y2) + "\" stroke=\"var(--grid)\"/>";
  }
  void raw(const std::string& text) { out_ += text; }
  std::string finish() { return out_ + "</svg>"; }

 private:
  std::string out_;
};

std::string figure(const std::string& title, const std::string& svg) {
  return "<figure><figcaption>" + escape_html(title) + "</figcaption>" + svg + "</figure>\n";
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string one_digit(double value) { return number(value); }

std::string series_colour(size_t index) {
  constexpr std::array<const char*, 7> kColours = {"#8a94a3", "#2f6fde", "#d9822b", "#1f9d6b",
                                                   "#c2457a", "#7a58c9", "#1794a8"};
  return index == 0 ? kColours[0] : kColours[1 + (index - 1) % (kColours.size() - 1)];
}

std::string heat_map(const HeatMap& map) {
  size_t widest = map.row_name.size();
  for (const std::string& row : map.rows) widest = std::max(widest, row.size());
  size_t widest_column = 0;
  for (const std::string& column : map.columns) {
    widest_column = std::max(widest_column, column.size());
  }
  const double left = 16 + 7.0 * static_cast<double>(widest), top = 40;
  const double cell = std::max(46.0, 10 + 7.0 * static_cast<double>(widest_column)), height = 26;
  Svg svg(left + cell * static_cast<double>(map.columns.size()) + 8,
          top + height * static_cast<double>(map.rows.size()) + 6);
  svg.text(left - 8, top - 8, map.row_name, "end");
  svg.text(left, 14, map.column_name, "start");
  for (size_t c = 0; c < map.columns.size(); ++c) {
    svg.text(left + cell * (static_cast<double>(c) + 0.5), top - 8, map.columns[c], "middle",
             "var(--ink)");
  }
  for (size_t r = 0; r < map.rows.size(); ++r) {
    const double y = top + height * static_cast<double>(r);
    svg.text(left - 8, y + 17, map.rows[r], "end", "var(--ink)");
    for (size_t c = 0; c < map.columns.size(); ++c) {
      const double x = left + cell * static_cast<double>(c);
      const auto& value = map.values[r][c];
      const std::string place = map.rows[r] + ", " + map.columns[c];
      if (!value) {
        svg.rect(x + 1, y + 1, cell - 2, height - 2, "var(--grid)", place + ": no items");
        continue;
      }
      const Colour colour = scale_colour(*value / 100);
      svg.rect(x + 1, y + 1, cell - 2, height - 2, css(colour), place + ": " + number(*value));
      svg.text(x + cell / 2, y + 17, std::to_string(std::lround(*value)), "middle", ink_on(colour));
    }
  }
  return figure(map.title, svg.finish());
}

std::string line_chart(const std::string& title, const std::string& y_name,
                       const std::vector<Series>& series) {
  constexpr double kLeft = 44, kTop = 26, kWidth = 520, kHeight = 200;
  Svg svg(kLeft + kWidth + 28, kTop + kHeight + 40);
  const auto x_of = [](double x) { return kLeft + kWidth * x; };
  const auto y_of = [](double y) { return kTop + kHeight * (1 - y / 100); };
  svg.text(kLeft, 14, y_name, "start");
  for (int mark = 0; mark <= 100; mark += 25) {
    svg.line(kLeft, y_of(mark), kLeft + kWidth, y_of(mark));
    svg.text(kLeft - 8, y_of(mark) + 4, std::to_string(mark), "end");
    svg.text(x_of(mark / 100.0), kTop + kHeight + 18, std::to_string(mark) + " %", "middle");
  }
  svg.text(kLeft + kWidth / 2, kTop + kHeight + 34, "place of the evidence in the context",
           "middle");
  for (const Series& one : series) {
    std::string points;
    for (const auto& [x, y] : one.points) points += number(x_of(x)) + "," + number(y_of(y)) + " ";
    svg.raw("<polyline points=\"" + points + "\" fill=\"none\" stroke=\"" + one.colour +
            "\" stroke-width=\"2.2\" stroke-linejoin=\"round\"" +
            (one.dashed ? " stroke-dasharray=\"6 4\"" : "") + "/>");
    for (const auto& [x, y] : one.points) {
      svg.raw("<circle cx=\"" + number(x_of(x)) + "\" cy=\"" + number(y_of(y)) +
              "\" r=\"3.4\" fill=\"" + one.colour + "\"><title>" +
              escape_html(one.name + ", " + number(100 * x) + " %: " + number(y)) +
              "</title></circle>");
    }
  }
  return figure(title, svg.finish());
}

std::string scatter_chart(const std::string& title, const std::vector<Dot>& dots) {
  constexpr double kLeft = 50, kTop = 26, kWidth = 520, kHeight = 220;
  Svg svg(kLeft + kWidth + 40, kTop + kHeight + 42);
  double most_bytes = 1, low = 0, high = 5;
  for (const Dot& dot : dots) {
    most_bytes = std::max(most_bytes, dot.bytes);
    low = std::min(low, dot.loss);
    high = std::max(high, dot.loss);
  }
  low = std::floor(low / 5) * 5;
  high = std::ceil(high / 5) * 5;
  const auto x_of = [&](double bytes) { return kLeft + kWidth * bytes / most_bytes; };
  const auto y_of = [&](double loss) { return kTop + kHeight * (high - loss) / (high - low); };
  svg.text(kLeft - 40, 14, "points lost against dense", "start");
  for (int mark = 0; mark <= 4; ++mark) {
    const double loss = low + (high - low) * mark / 4, bytes = most_bytes * mark / 4;
    svg.line(kLeft, y_of(loss), kLeft + kWidth, y_of(loss));
    svg.text(kLeft - 8, y_of(loss) + 4, number(loss), "end");
    svg.text(x_of(bytes), kTop + kHeight + 18, format_bytes(static_cast<int64_t>(bytes)), "middle");
  }
  svg.raw("<line x1=\"" + number(kLeft) + "\" y1=\"" + number(y_of(0)) + "\" x2=\"" +
          number(kLeft + kWidth) + "\" y2=\"" + number(y_of(0)) +
          "\" stroke=\"var(--dim)\" stroke-width=\"1.4\"/>");
  svg.text(kLeft + kWidth / 2, kTop + kHeight + 36, "bytes fetched per token", "middle");
  for (const Dot& dot : dots) {
    svg.raw("<circle cx=\"" + number(x_of(dot.bytes)) + "\" cy=\"" + number(y_of(dot.loss)) +
            "\" r=\"6\" fill=\"" + dot.colour + "\" fill-opacity=\"0.75\"><title>" +
            escape_html(dot.tip) + "</title></circle>");
  }
  return figure(title, svg.finish());
}

std::string legend(const std::vector<std::string>& names) {
  std::string out = "<p class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i) {
    out += "<span><i style=\"background:" + series_colour(i) + "\"></i>" + escape_html(names[i]) +
           "</span>";
  }
  return out + "</p>\n";
}

}  // namespace clo
