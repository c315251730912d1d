#include "heat_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>
#include <vector>

namespace clo::app {

namespace {

constexpr int64_t kCell = 16, kLeft = 40, kTop = 48, kRight = 96, kBottom = 24;
constexpr int64_t kScaleSteps = 11;  // of the legend

struct Colour {
  uint8_t red, green, blue;
};

// Dark blue over green to yellow, even in lightness: points of viridis, between them straight.
Colour colour_of(double share) {
  constexpr std::array<std::array<double, 3>, 5> kPoints = {
      {{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}}};
  const double place = std::clamp(std::isnan(share) ? 0.0 : share, 0.0, 1.0) * 4;
  const auto below = std::min<size_t>(static_cast<size_t>(place), 3);
  const double rest = place - static_cast<double>(below);
  const auto mix = [&](size_t channel) {
    return static_cast<uint8_t>(
        std::lround((1 - rest) * kPoints[below][channel] + rest * kPoints[below + 1][channel]));
  };
  return {mix(0), mix(1), mix(2)};
}

double share_of(const HeatMap& map, double value) {
  return map.high > map.low ? (value - map.low) / (map.high - map.low) : 0;
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

// What both kinds of file show: filled rectangles and words.
class Canvas {
 public:
  virtual ~Canvas() = default;
  virtual void fill(int64_t x, int64_t y, int64_t width, int64_t height, Colour colour) = 0;
  virtual void write(int64_t x, int64_t y, std::string_view words) = 0;  // top left of the words
};

int64_t width_of(const HeatMap& map) {
  const int64_t title = kLeft + 8 * std::ssize(map.title) + 16;
  return std::max(kLeft + kCell * map.num_heads + kRight, title);
}
int64_t height_of(const HeatMap& map) {
  return kTop + kBottom + kCell * std::max(map.num_layers, kScaleSteps);
}

void draw(const HeatMap& map, Canvas& canvas) {
  canvas.write(kLeft, 8, map.title);
  canvas.write(4, 28, "layer");
  canvas.write(kLeft + 16, 28, "head");
  for (int64_t layer = 0; layer < map.num_layers; ++layer) {
    const int64_t y = kTop + layer * kCell;
    canvas.write(12, y + 4, std::to_string(layer));
    for (int64_t head = 0; head < map.num_heads; ++head) {
      const double value = map.values[static_cast<size_t>(layer * map.num_heads + head)];
      canvas.fill(kLeft + head * kCell, y, kCell - 1, kCell - 1, colour_of(share_of(map, value)));
    }
  }
  const int64_t x = kLeft + kCell * map.num_heads + 16;
  for (int64_t i = 0; i < kScaleSteps; ++i) {
    const double share = 1 - static_cast<double>(i) / (kScaleSteps - 1);
    canvas.fill(x, kTop + i * kCell, kCell, kCell, colour_of(share));
    if (i % 5 == 0) {
      canvas.write(x + kCell + 6, kTop + i * kCell + 4,
                   number(map.low + share * (map.high - map.low)));
    }
  }
}

class SvgCanvas : public Canvas {
 public:
  explicit SvgCanvas(const HeatMap& map) {
    const std::string size = "width=\"" + std::to_string(width_of(map)) + "\" height=\"" +
                             std::to_string(height_of(map)) + "\"";
    text_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" " + size +
            " font-family=\"monospace\" font-size=\"11\">\n<rect " + size + " fill=\"white\"/>\n";
  }
  void fill(int64_t x, int64_t y, int64_t width, int64_t height, Colour c) override {
    char line[160];
    std::snprintf(line, sizeof line,
                  "<rect x=\"%lld\" y=\"%lld\" width=\"%lld\" height=\"%lld\" "
                  "fill=\"#%02x%02x%02x\"/>\n",
                  static_cast<long long>(x), static_cast<long long>(y),
                  static_cast<long long>(width), static_cast<long long>(height), c.red, c.green,
                  c.blue);
    text_ += line;
  }
  void write(int64_t x, int64_t y, std::string_view words) override {
    text_ += "<text x=\"" + std::to_string(x) + "\" y=\"" + std::to_string(y + 8) + "\">" +
             std::string(words) + "</text>\n";
  }
  std::string take() { return text_ + "</svg>\n"; }

 private:
  std::string text_;
};

// Letters of three by five dots, a row in three bits, the top row in the highest bits.
struct Letter {
  char name;
  uint16_t dots;
};
constexpr std::array<Letter, 38> kLetters = {
    {{'0', 0b111101101101111}, {'1', 0b010110010010111}, {'2', 0b111001111100111},
     {'3', 0b111001011001111}, {'4', 0b101101111001001}, {'5', 0b111100111001111},
     {'6', 0b111100111101111}, {'7', 0b111001010010010}, {'8', 0b111101111101111},
     {'9', 0b111101111001111}, {'a', 0b010101111101101}, {'b', 0b110101110101110},
     {'c', 0b011100100100011}, {'d', 0b110101101101110}, {'e', 0b111100110100111},
     {'f', 0b111100110100100}, {'g', 0b011100101101011}, {'h', 0b101101111101101},
     {'i', 0b111010010010111}, {'j', 0b001001001101010}, {'k', 0b101101110101101},
     {'l', 0b100100100100111}, {'m', 0b101111111101101}, {'n', 0b110101101101101},
     {'o', 0b010101101101010}, {'p', 0b110101110100100}, {'q', 0b010101101110011},
     {'r', 0b110101110101101}, {'s', 0b011100010001110}, {'t', 0b111010010010010},
     {'u', 0b101101101101111}, {'v', 0b101101101101010}, {'w', 0b101101111111101},
     {'x', 0b101101010101101}, {'y', 0b101101010010010}, {'z', 0b111001010100111},
     {'.', 0b000000000000010}, {'-', 0b000000111000000}}};

class PngCanvas : public Canvas {
 public:
  explicit PngCanvas(const HeatMap& map)
      : width_(width_of(map)),
        height_(height_of(map)),
        pixels_(static_cast<size_t>(3 * width_ * height_), 255) {}
  void fill(int64_t x, int64_t y, int64_t width, int64_t height, Colour c) override {
    for (int64_t row = y; row < std::min(y + height, height_); ++row) {
      for (int64_t column = x; column < std::min(x + width, width_); ++column) {
        uint8_t* pixel = pixels_.data() + 3 * (row * width_ + column);
        pixel[0] = c.red;
        pixel[1] = c.green;
        pixel[2] = c.blue;
      }
    }
  }
  void write(int64_t x, int64_t y, std::string_view words) override {
    for (const char c : words) {
      const auto* const letter = std::find_if(kLetters.begin(), kLetters.end(),
                                              [&](const Letter& l) { return l.name == c; });
      for (int64_t dot = 0; dot < 15 && letter != kLetters.end(); ++dot) {
        if ((letter->dots >> (14 - dot)) & 1u) {
          fill(x + 2 * (dot % 3), y + 2 * (dot / 3), 2, 2, {0, 0, 0});
        }
      }
      x += 8;
    }
  }
  std::string take() const;

 private:
  int64_t width_, height_;
  std::vector<uint8_t> pixels_;  // [height, width, 3]
};

void append_u32(std::string& bytes, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>((value >> shift) & 0xFF);
}

// A chunk: length, name, content, CRC-32 of name and content.
void append_chunk(std::string& file, std::string_view name, const std::string& content) {
  append_u32(file, static_cast<uint32_t>(content.size()));
  const std::string checked = std::string(name) + content;
  uint32_t crc = 0xFFFFFFFFu;
  for (const char c : checked) {
    crc ^= static_cast<uint8_t>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xEDB88320u : 0);
  }
  file += checked;
  append_u32(file, ~crc);
}

// A zlib stream of stored blocks: 65,535 bytes each at most.
std::string stored_stream(const std::string& content) {
  std::string stream = "\x78\x01";
  for (size_t at = 0; at < content.size();) {
    const size_t count = std::min<size_t>(content.size() - at, 65535);
    stream += static_cast<char>(at + count == content.size());
    for (const size_t length : {count, count ^ 0xFFFF}) {
      stream += static_cast<char>(length & 0xFF);
      stream += static_cast<char>(length >> 8);
    }
    stream.append(content, at, count);
    at += count;
  }
  uint32_t a = 1, b = 0;  // Adler-32
  for (const char c : content) {
    a = (a + static_cast<uint8_t>(c)) % 65521;
    b = (b + a) % 65521;
  }
  append_u32(stream, (b << 16) | a);
  return stream;
}

std::string PngCanvas::take() const {
  std::string header;
  append_u32(header, static_cast<uint32_t>(width_));
  append_u32(header, static_cast<uint32_t>(height_));
  header += std::string("\x08\x02\x00\x00\x00", 5);  // 8 bits, RGB, no interlace
  std::string rows;
  for (int64_t row = 0; row < height_; ++row) {
    rows += '\0';  // no filter
    rows.append(reinterpret_cast<const char*>(pixels_.data()) + 3 * row * width_,
                static_cast<size_t>(3 * width_));
  }
  std::string file = "\x89PNG\r\n\x1A\n";
  append_chunk(file, "IHDR", header);
  append_chunk(file, "IDAT", stored_stream(rows));
  append_chunk(file, "IEND", "");
  return file;
}

}  // namespace

std::string svg_of(const HeatMap& map) {
  SvgCanvas canvas(map);
  draw(map, canvas);
  return canvas.take();
}

std::string png_of(const HeatMap& map) {
  PngCanvas canvas(map);
  draw(map, canvas);
  return canvas.take();
}

}  // namespace clo::app
