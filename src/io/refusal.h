#pragma once
// How this room words a refusal: the two error codes it uses, and safe quoting of outside text.
#include <string>
#include <string_view>
#include <vector>

#include "clo/error.h"

namespace clo {

inline Error bad_file(std::string where, std::string message) {
  return Error{ErrorCode::kBadFile, std::move(message), std::move(where)};
}
inline Error unsupported(std::string where, std::string message) {
  return Error{ErrorCode::kUnsupported, std::move(message), std::move(where)};
}

// `text` in quotes, fit for a terminal: control bytes become '?', the middle of a long text "...".
std::string in_quotes(std::string_view text);

// "a, b, c and 7 more": at most `limit` items are spelled out.
std::string listed(const std::vector<std::string>& items, size_t limit);

}  // namespace clo
