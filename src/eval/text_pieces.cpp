#include "eval/text_pieces.h"

#include <algorithm>
#include <cctype>

namespace clo {

namespace {

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

}  // namespace

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    if (is_space(text[at])) {
      ++at;
      continue;
    }
    const auto* end = std::find_if(text.data() + at, text.data() + text.size(), is_space);
    words.emplace_back(text.data() + at, end);
    at = static_cast<size_t>(end - text.data());
  }
  return words;
}

std::vector<std::string> characters(std::string_view text) {
  std::vector<std::string> found;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0u) == 0x80u) ++end;
    found.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return found;
}

std::string joined_with_and(const std::vector<std::string>& pieces) {
  std::string out;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i > 0) out += pieces.size() > 2 ? ", " : " ";
    if (i > 0 && i + 1 == pieces.size()) out += "and ";
    out += pieces[i];
  }
  return out;
}

}  // namespace clo
