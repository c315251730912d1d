#include "base/units.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace clo {

namespace {

struct Unit {
  std::string_view name;
  double bytes;
};

constexpr double kKi = 1024.0;
constexpr std::array<Unit, 14> kUnits = {{{"", 1},
                                          {"b", 1},
                                          {"k", kKi},
                                          {"kib", kKi},
                                          {"m", kKi* kKi},
                                          {"mib", kKi* kKi},
                                          {"g", kKi* kKi* kKi},
                                          {"gib", kKi* kKi* kKi},
                                          {"t", kKi* kKi* kKi* kKi},
                                          {"tib", kKi* kKi* kKi* kKi},
                                          {"kb", 1e3},
                                          {"mb", 1e6},
                                          {"gb", 1e9},
                                          {"tb", 1e12}}};

Error bad_size(std::string_view text) {
  return Error{ErrorCode::kBadFlag,
               "expected a size such as 24GiB, 512MiB or a number of bytes, found \"" +
                   std::string(text) + "\"",
               ""};
}

}  // namespace

Result<int64_t> parse_size(std::string_view text) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, fault] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (fault != std::errc() || !std::isfinite(number) || number < 0) return bad_size(text);
  std::string unit;
  for (const char* p = rest; p != end; ++p) {
    if (*p == ' ' && unit.empty()) continue;
    unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*p)));
  }
  const auto found = std::find_if(kUnits.begin(), kUnits.end(),
                                  [&](const Unit& candidate) { return candidate.name == unit; });
  if (found == kUnits.end()) return bad_size(text);
  const double bytes = std::floor(number * found->bytes);
  if (bytes > 0x1p62) return bad_size(text);
  return static_cast<int64_t>(bytes);
}

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  const int decimals =
      unit == 0 || std::abs(value) >= 99.95 ? 0 : (std::abs(value) >= 9.995 ? 1 : 2);
  char text[32];
  std::snprintf(text, sizeof text, "%.*f %s", decimals, value, kNames[unit]);
  return text;
}

std::optional<int64_t> checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

}  // namespace clo
