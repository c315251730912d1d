#pragma once
// How much one rendering may do, and where in the template it is. Every step of the evaluator and
// every byte a builtin makes is paid for here, so that a hostile template ends with an Error
// instead of eating time, memory or stack. One object a rendering; not shared.
#include <cstdint>
#include <string>
#include <utility>

#include "base/try.h"
#include "clo/result.h"

namespace clo::jinja {

class Work {
 public:
  Work(std::string where, int64_t units) : where_(std::move(where)), units_(units) {}

  // Pays for `units` steps or bytes. Requires: units >= 0. Fails: kBadRequest when used up.
  Status spend(int64_t units) {
    if (units > units_) {
      units_ = 0;
      return fail("the template does more work than any chat needs; it may not end");
    }
    units_ -= units;
    return Ok{};
  }
  Status spend_bytes(size_t bytes) { return spend(static_cast<int64_t>(bytes / 4) + 1); }
  // Items of a list, or characters that become strings of their own, cost what they occupy.
  Status spend_items(size_t items) { return spend(8 * static_cast<int64_t>(items) + 1); }
  // A search for `part` may compare it at every place of the text.
  Status spend_search(size_t text_bytes, size_t part_bytes) {
    CLO_TRY(spend_bytes(text_bytes));
    return spend(static_cast<int64_t>(text_bytes) * static_cast<int64_t>(part_bytes / 64));
  }

  // An error of the request or of the template's logic, at the current line.
  Error fail(const std::string& message) const {
    return Error{ErrorCode::kBadRequest, at_line() + message, where_};
  }
  // Something Jinja can do and this evaluator cannot, at the current line.
  Error unsupported(const std::string& construct) const {
    return Error{ErrorCode::kUnsupported, at_line() + construct + " is not supported", where_};
  }
  void set_line(int line) { line_ = line; }
  const std::string& where() const { return where_; }

 private:
  std::string at_line() const { return "line " + std::to_string(line_) + ": "; }

  std::string where_;
  int64_t units_;
  int line_ = 1;
};

}  // namespace clo::jinja
