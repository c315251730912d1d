#pragma once
// Word lists for keys, values and generated prose.
#include <span>
#include <string_view>

namespace clo {

std::span<const std::string_view> adjectives();
std::span<const std::string_view> nouns();
std::span<const std::string_view> verbs();  // third person, present

}  // namespace clo
