#pragma once
// Small cuts of text that suites and scorers share.
#include <string>
#include <string_view>
#include <vector>

namespace clo {

// ASCII letters in lower case.
std::string lower_case(std::string_view text);
// Without ASCII white space at the ends.
std::string_view trimmed(std::string_view text);
// The pieces between runs of ASCII white space.
std::vector<std::string> split_words(std::string_view text);
// UTF-8 characters. Requires: valid UTF-8.
std::vector<std::string> characters(std::string_view text);
// "a", "a and b", "a, b, and c".
std::string joined_with_and(const std::vector<std::string>& pieces);

}  // namespace clo
