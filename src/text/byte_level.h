#pragma once
// The byte-level alphabet of GPT-2: each of the 256 bytes is spelled as one printable character, so
// that a vocabulary file can hold any byte string ("Ġ" is the space). Pure functions.
#include <optional>
#include <string>
#include <string_view>

namespace clo {

// The spelling of a byte string.
std::string spell_bytes(std::string_view bytes);

// The bytes of a spelling, or nothing when a character is outside the alphabet.
std::optional<std::string> unspell_bytes(std::string_view spelling);

}  // namespace clo
