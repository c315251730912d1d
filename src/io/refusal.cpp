#include "io/refusal.h"

#include <algorithm>

namespace clo {

std::string in_quotes(std::string_view text) {
  constexpr size_t kMaxLength = 160;
  std::string shown(text);
  if (text.size() > kMaxLength) {
    const std::string_view tail = text.substr(text.size() - kMaxLength / 2);
    shown = std::string(text.substr(0, kMaxLength / 2)) + "..." + std::string(tail);
  }
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return "\"" + shown + "\"";
}

std::string listed(const std::vector<std::string>& items, size_t limit) {
  std::string text;
  const size_t shown = std::min(limit, items.size());
  for (size_t i = 0; i < shown; ++i) text += (i ? ", " : "") + items[i];
  if (shown < items.size()) text += " and " + std::to_string(items.size() - shown) + " more";
  return text;
}

}  // namespace clo
