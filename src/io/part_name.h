#pragma once
// Names of files that are parts of one model: NAME-00002-of-00003.ENDING, counted from 1, as
// converters and the hub name them.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace clo {

struct PartName {
  std::string stem;  // NAME
  std::string ending;
  int64_t number = 0, count = 0;

  // The name of another part of the same set.
  std::string of(int64_t other) const;
};

// Nothing where `file_name` is no such name: five digits each, 1 <= number <= count.
std::optional<PartName> part_name(std::string_view file_name, std::string_view ending);

}  // namespace clo
