#pragma once
// The regular expression by which a tokenizer cuts text into words before merging. Tokenizer files
// are written for Oniguruma; patterns run here on PCRE2 with Unicode classes, and every construct
// that the two read differently is either translated (\s, \v, \u) or refused by name.
// Immutable after compile(); split() is safe from any thread (scratch memory is per thread).
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"

namespace clo {

class SplitPattern {
 public:
  // `source` is a regular expression in Oniguruma's syntax.
  // Fails: kUnsupported for constructs outside the common subset, kBadFile for malformed ones.
  static Result<SplitPattern> compile(std::string_view source, const std::string& where);
  // Matches `text` itself. Fails: kBadFile when it is empty.
  static Result<SplitPattern> literal(std::string_view text, const std::string& where);

  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;
  ~SplitPattern();

  // Appends matches and the gaps between them, in order, as parts of `text`; none is empty.
  // Requires: text is valid UTF-8. Fails: kBadRequest when matching passes its work limit.
  Status split(std::string_view text, std::vector<std::string_view>& pieces) const;

  const std::string& source() const { return source_; }

 private:
  struct Code;
  SplitPattern(std::string source, std::unique_ptr<Code> code);
  static Result<SplitPattern> build(std::string_view source, const std::string& pattern,
                                    bool literal, const std::string& where);

  std::string source_;
  std::unique_ptr<Code> code_;
};

// The PCRE2 spelling of an Oniguruma pattern. Fails: as SplitPattern::compile.
Result<std::string> translate_pattern(std::string_view source, const std::string& where);

}  // namespace clo
