#pragma once
// Python's string functions, on UTF-8 and counting in code points where Python does. Case mappings
// are the simple ones (one character to one character). Pure functions; arguments are valid UTF-8.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace clo::jinja {

// Python's str.isspace for one character.
bool is_python_space(char32_t c);

size_t count_characters(std::string_view text);
// Byte offset of the character of that index, or text.size().
size_t character_offset(std::string_view text, size_t index);

enum class Side { kLeft, kRight, kBoth };
// Removes characters of `chars`, or white space without.
std::string_view strip(std::string_view text, Side side,
                       std::optional<std::string_view> chars = std::nullopt);

// At most `most` cuts (negative: any number), counted from the left or the right.
// Requires: separator, if given, is not empty.
std::vector<std::string> split(std::string_view text, std::optional<std::string_view> separator,
                               int64_t most, bool from_right);
std::vector<std::string> split_lines(std::string_view text);

// How often `part` occurs without overlap; an empty part between all characters.
size_t count_parts(std::string_view text, std::string_view part);
// Replaces the first `most` occurrences (negative: all).
std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t most);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
// str.title(): a letter is upper case after anything that is not a letter.
std::string title(std::string_view text);
// Jinja's filter: words begin after white space, '-', and opening brackets.
std::string title_filter(std::string_view text);

}  // namespace clo::jinja
