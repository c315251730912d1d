#pragma once
// The few Unicode facts tokenizers and templates need: white space, word characters and the four
// normal forms. Pure functions, safe from any thread.
#include <string>
#include <string_view>

#include "clo/result.h"

namespace clo {

// Unicode's White_Space property, which is what \s means in a tokenizer file.
bool is_white_space(char32_t c);

// Letters, marks, decimal digits, letter numbers, connectors and joiners: \w of Rust's regex, used
// by the single_word flag of added tokens.
bool is_word_character(char32_t c);

// Letters of any case, used by title casing.
bool is_letter(char32_t c);

// Whether Python's repr() prints the character as itself.
bool is_printable(char32_t c);

// Simple case mappings: one character to one character.
char32_t to_upper(char32_t c);
char32_t to_lower(char32_t c);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
std::string_view normal_form_name(NormalForm form);

// Requires: text is valid UTF-8. Fails: kBadRequest when the library runs out of room.
Result<std::string> normalize(NormalForm form, std::string_view text);

}  // namespace clo
