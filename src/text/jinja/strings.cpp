#include "text/jinja/strings.h"

#include <algorithm>

#include "base/utf8.h"
#include "text/unicode.h"

namespace clo::jinja {

namespace {

struct Character {
  char32_t code;
  size_t length;
};

Character first_of(std::string_view text) {
  const Utf8Step step = decode_utf8(text);
  return {step.code_point, step.length};
}

Character last_of(std::string_view text) {
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  return first_of(text.substr(start));
}

bool is_in(char32_t c, std::optional<std::string_view> chars) {
  if (!chars) return is_python_space(c);
  std::string spelled;
  append_utf8(c, spelled);
  return chars->find(spelled) != std::string_view::npos;
}

// Applies `change(character, previous character)` to each character.
template <typename Change>
std::string map_characters(std::string_view text, Change change) {
  std::string made;
  made.reserve(text.size());
  char32_t previous = 0;
  while (!text.empty()) {
    const Character c = first_of(text);
    append_utf8(change(c.code, previous), made);
    previous = c.code;
    text.remove_prefix(c.length);
  }
  return made;
}

std::vector<std::string> split_space(std::string_view text, int64_t most, bool from_right) {
  std::vector<std::string> parts;
  const Side near = from_right ? Side::kRight : Side::kLeft;
  text = strip(text, near);
  while (!text.empty()) {
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.emplace_back(text);  // what is left keeps the white space of its far end
      break;
    }
    size_t length = 0;
    while (length < text.size()) {
      const Character c = from_right ? last_of(text.substr(0, text.size() - length))
                                     : first_of(text.substr(length));
      if (is_python_space(c.code)) break;
      length += c.length;
    }
    const size_t rest = text.size() - length;
    parts.emplace_back(from_right ? text.substr(rest) : text.substr(0, length));
    text = strip(from_right ? text.substr(0, rest) : text.substr(length), near);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

}  // namespace

bool is_python_space(char32_t c) { return is_white_space(c) || (c >= 0x1C && c <= 0x1F); }

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

size_t character_offset(std::string_view text, size_t index) {
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) at += first_of(text.substr(at)).length;
  return at;
}

std::string_view strip(std::string_view text, Side side, std::optional<std::string_view> chars) {
  while (side != Side::kRight && !text.empty()) {
    const Character c = first_of(text);
    if (!is_in(c.code, chars)) break;
    text.remove_prefix(c.length);
  }
  while (side != Side::kLeft && !text.empty()) {
    const Character c = last_of(text);
    if (!is_in(c.code, chars)) break;
    text.remove_suffix(c.length);
  }
  return text;
}

std::vector<std::string> split(std::string_view text, std::optional<std::string_view> separator,
                               int64_t most, bool from_right) {
  if (!separator) return split_space(text, most, from_right);
  std::vector<std::string> parts;
  while (most < 0 || static_cast<int64_t>(parts.size()) < most) {
    const size_t place = from_right ? text.rfind(*separator) : text.find(*separator);
    if (place == std::string_view::npos) break;
    const size_t after = place + separator->size();
    parts.emplace_back(from_right ? text.substr(after) : text.substr(0, place));
    text = from_right ? text.substr(0, place) : text.substr(after);
  }
  parts.emplace_back(text);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> split_lines(std::string_view text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const Character c = first_of(text.substr(at));
    size_t end = at + c.length;
    const bool ends = (c.code >= 0x0A && c.code <= 0x0D) || (c.code >= 0x1C && c.code <= 0x1E) ||
                      c.code == 0x85 || c.code == 0x2028 || c.code == 0x2029;
    if (ends) {
      lines.emplace_back(text.substr(begin, at - begin));
      if (c.code == '\r' && end < text.size() && text[end] == '\n') ++end;
      begin = end;
    }
    at = end;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

size_t count_parts(std::string_view text, std::string_view part) {
  if (part.empty()) return count_characters(text) + 1;
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos;
       at = text.find(part, at + part.size()))
    ++count;
  return count;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t most) {
  std::string made;
  size_t at = 0;
  while (most != 0) {
    const size_t place = from.empty() ? at : text.find(from, at);
    if (place == std::string_view::npos) break;
    made += text.substr(at, place - at);
    made += to;
    at = place + from.size();
    if (most > 0) --most;
    if (!from.empty()) continue;
    if (at == text.size()) return made;
    const size_t length = first_of(text.substr(at)).length;
    made += text.substr(at, length);
    at += length;
  }
  made += text.substr(at);
  return made;
}

std::string upper(std::string_view text) {
  return map_characters(text, [](char32_t c, char32_t) { return to_upper(c); });
}

std::string lower(std::string_view text) {
  return map_characters(text, [](char32_t c, char32_t) { return to_lower(c); });
}

std::string capitalize(std::string_view text) {
  if (text.empty()) return "";
  const size_t head = first_of(text).length;
  return upper(text.substr(0, head)) + lower(text.substr(head));
}

std::string title(std::string_view text) {
  return map_characters(text, [](char32_t c, char32_t previous) {
    return is_letter(previous) ? to_lower(c) : to_upper(c);
  });
}

std::string title_filter(std::string_view text) {
  return map_characters(text, [](char32_t c, char32_t previous) {
    const bool starts = previous == 0 || is_python_space(previous) || previous == '-' ||
                        previous == '(' || previous == '{' || previous == '[' || previous == '<';
    return starts ? to_upper(c) : to_lower(c);
  });
}

}  // namespace clo::jinja
