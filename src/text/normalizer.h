#pragma once
// One step of a tokenizer's normaliser, as tokenizer.json describes it: a Unicode normal form, a
// text put in front, or a literal text replaced. Plain values and a pure function.
#include <string>
#include <string_view>

#include "clo/result.h"
#include "text/unicode.h"

namespace clo {

struct NormalizerStep {
  enum class Kind { kForm, kPrepend, kReplace };
  Kind kind = Kind::kForm;
  NormalForm form = NormalForm::kNfc;
  std::string pattern = {};  // kReplace: what is replaced; never empty
  std::string content = {};  // kPrepend: what is put before a text; kReplace: what comes instead
};

// Requires: text is valid UTF-8. An empty text stays empty. Fails: as normalize().
Result<std::string> apply_step(const NormalizerStep& step, std::string_view text);

// "NFC", "Prepend", "Replace": the name that tokenizer.json uses.
std::string_view step_name(const NormalizerStep& step);

// `text` with every occurrence of `pattern`, from the left. Requires: !pattern.empty().
std::string replace_all(std::string_view text, std::string_view pattern, std::string_view content);

}  // namespace clo
