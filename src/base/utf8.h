#pragma once
// UTF-8 validation and decoding (Unicode 15, table 3-7: no overlong forms, no surrogates).
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace clo {

// One step of a decoder: a code point and its length, or a malformed or incomplete sequence.
struct Utf8Step {
  enum class Kind { kCodePoint, kInvalid, kIncomplete };
  Kind kind = Kind::kInvalid;
  char32_t code_point = 0;
  // Bytes to consume: the character, or the longest prefix of a malformed one that is to be
  // replaced by a single U+FFFD (the practice of the Unicode standard, section 3.9).
  size_t length = 0;
};

// Decodes the character at the front of `bytes`. Requires: !bytes.empty().
Utf8Step decode_utf8(std::string_view bytes);

// Offset of the first byte that is not valid UTF-8, or bytes.size() when all is valid.
size_t find_invalid_utf8(std::string_view bytes);

void append_utf8(char32_t code_point, std::string& out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace clo
