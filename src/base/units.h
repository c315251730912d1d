#pragma once
// Sizes and numbers as people write them, and overflow-safe arithmetic on sizes from files.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "clo/result.h"

namespace clo {

// Parses "24GiB", "512 MiB", "1.5GB", "4096". KiB, MiB, GiB, TiB are powers of 1,024; KB, MB, GB,
// TB powers of 1,000; the bare letters K, M, G, T mean the binary units. Case is ignored.
// Fails: kBadFlag for anything else, a negative size, or one beyond 2^62.
Result<int64_t> parse_size(std::string_view text);

// "1.25 GiB", "512 MiB", "37 B": three significant digits, binary units.
std::string format_bytes(int64_t bytes);

// a * b and a + b for non-negative sizes; nothing when the result does not fit.
std::optional<int64_t> checked_mul(int64_t a, int64_t b);
std::optional<int64_t> checked_add(int64_t a, int64_t b);

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace clo
