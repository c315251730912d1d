#pragma once
// Cuts a template into text and tokens as Jinja 3.1 does with trim_blocks, lstrip_blocks and
// without keep_trailing_newline: the settings under which chat templates are written. Pure
// functions.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"

namespace clo::jinja {

struct Token {
  enum class Kind {
    kText,         // text outside all tags
    kOutputBegin,  // {{
    kOutputEnd,    // }}
    kBlockBegin,   // {%
    kBlockEnd,     // %}
    kName,
    kString,   // text: unescaped
    kInteger,  // integer
    kFloat,    // real
    kSymbol,   // text: the operator
    kEnd,
  };
  Kind kind = Kind::kEnd;
  int line = 1;
  std::string text;
  int64_t integer = 0;
  double real = 0;

  bool is(Kind wanted, std::string_view wanted_text) const {
    return kind == wanted && text == wanted_text;
  }
  bool is_symbol(std::string_view symbol) const { return is(Kind::kSymbol, symbol); }
  bool is_name(std::string_view name) const { return is(Kind::kName, name); }
};

// The tokens of `source`, the last of them kEnd.
// Fails: kBadFile with the line for malformed templates.
Result<std::vector<Token>> tokenize(std::string_view source, const std::string& where);

}  // namespace clo::jinja
