#pragma once
// Heat maps: a number in [0, 1] for every layer and head as a coloured cell, as an SVG and as a PNG
// drawn alike. No library: an SVG is text, and a PNG may hold its pixels uncompressed.
#include <cstdint>
#include <span>
#include <string>

namespace clo::app {

struct HeatMap {
  std::string title;              // lower-case letters, digits, spaces and points
  std::span<const float> values;  // [num_layers, num_heads]
  int64_t num_layers = 0, num_heads = 0;
  double low = 0, high = 1;  // values of the two ends of the scale
};

std::string svg_of(const HeatMap& map);
std::string png_of(const HeatMap& map);

}  // namespace clo::app
