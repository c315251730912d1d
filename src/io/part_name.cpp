#include "io/part_name.h"

#include <algorithm>

namespace clo {

namespace {

constexpr size_t kDigits = 5;
constexpr std::string_view kOf = "-of-";

std::optional<int64_t> number_of(std::string_view digits) {
  int64_t value = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  return value;
}

std::string five_digits(int64_t value) {
  const std::string digits = std::to_string(value);
  return std::string(kDigits - std::min(kDigits, digits.size()), '0') + digits;
}

}  // namespace

std::string PartName::of(int64_t other) const {
  return stem + "-" + five_digits(other) + std::string(kOf) + five_digits(count) + ending;
}

std::optional<PartName> part_name(std::string_view file_name, std::string_view ending) {
  constexpr size_t kTail = 1 + kDigits + kOf.size() + kDigits;
  if (!file_name.ends_with(ending) || file_name.size() <= kTail + ending.size()) {
    return std::nullopt;
  }
  const std::string_view base = file_name.substr(0, file_name.size() - ending.size());
  const std::string_view tail = base.substr(base.size() - kTail);
  if (tail[0] != '-' || tail.substr(1 + kDigits, kOf.size()) != kOf) return std::nullopt;
  const auto number = number_of(tail.substr(1, kDigits));
  const auto count = number_of(tail.substr(kTail - kDigits));
  if (!number || !count || *number < 1 || *number > *count) return std::nullopt;
  return PartName{std::string(base.substr(0, base.size() - kTail)), std::string(ending), *number,
                  *count};
}

}  // namespace clo
