#include "text/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cctype>

#include "base/check.h"
#include "base/try.h"

namespace clo {

namespace {

// Enough for a linear scan of any prompt; a pattern that backtracks exponentially meets them fast.
constexpr uint32_t kMatchLimit = 50'000'000;
constexpr uint32_t kHeapLimitKib = 256 * 1024;
constexpr size_t kJitStackBytes = 8 << 20;
constexpr size_t kMaxPatternBytes = 64 << 10;

// PCRE2's \s also takes U+180E, which has not been white space since Unicode 6.3.
constexpr std::string_view kSpaceClass = "\\t-\\r\\x{20}\\x{85}\\p{Z}";

std::string pcre_message(int code) {
  PCRE2_UCHAR text[256];
  if (pcre2_get_error_message(code, text, sizeof text) < 0) return "PCRE2 error";
  return reinterpret_cast<const char*>(text);
}

// Match scratch of one thread: limits, JIT stack and the place of the match.
class Scratch {
 public:
  Scratch()
      : context_(pcre2_match_context_create(nullptr)),
        stack_(pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr)),
        data_(pcre2_match_data_create(1, nullptr)) {
    CLO_CHECK(context_ != nullptr && data_ != nullptr);
    pcre2_set_match_limit(context_, kMatchLimit);
    pcre2_set_heap_limit(context_, kHeapLimitKib);
    // Without JIT support the stack is null and the interpreter runs; both give the same matches.
    if (stack_ != nullptr) pcre2_jit_stack_assign(context_, nullptr, stack_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    pcre2_match_data_free(data_);
    pcre2_match_context_free(context_);
    pcre2_jit_stack_free(stack_);
  }
  pcre2_match_context* context() { return context_; }
  pcre2_match_data* data() { return data_; }

 private:
  pcre2_match_context* context_;
  pcre2_jit_stack* stack_;
  pcre2_match_data* data_;
};

// Walks an Oniguruma pattern once, copying what both engines read alike.
class Translator {
 public:
  Translator(std::string_view source, const std::string& where) : source_(source), where_(where) {}

  Result<std::string> run() {
    while (at_ < source_.size()) {
      const char c = source_[at_];
      if (c == '\\') {
        CLO_TRY(escape());
      } else if (in_class_) {
        CLO_TRY(class_character(c));
      } else if (c == '[') {
        open_class();
      } else if (c == '(') {
        CLO_TRY(group());
      } else if (source_.substr(at_, 2) == "}+") {
        return refuse("}+");
      } else if (source_.substr(at_, 2) == "{,") {
        return refuse("{,");
      } else {
        copy(1);
      }
    }
    return std::move(out_);
  }

 private:
  void copy(size_t count) {
    out_ += source_.substr(at_, count);
    at_ += count;
  }
  void replace(size_t count, std::string_view with) {
    out_ += with;
    at_ += count;
  }
  Error refuse(std::string_view construct) const {
    return Error{ErrorCode::kUnsupported,
                 "the construct \"" + std::string(construct) + "\" at byte " + std::to_string(at_) +
                     " of the split pattern is not supported: " + std::string(source_),
                 where_};
  }

  Status escape() {
    if (at_ + 1 == source_.size()) return refuse("\\ at the end");
    const char c = source_[at_ + 1];
    const std::string spaces(kSpaceClass);
    switch (c) {
      case 's':
        replace(2, in_class_ ? spaces : "[" + spaces + "]");
        return Ok{};
      case 'S':
        replace(2, in_class_ ? "\\S\\x{180E}" : "[^" + spaces + "]");
        return Ok{};
      case 'v':  // a vertical tab in Oniguruma, a class in PCRE2
        replace(2, "\\x{0B}");
        return Ok{};
      case 'u':
        return hexadecimal(4, true);
      case 'x':
        if (source_.substr(at_ + 2, 1) == "{") {
          const size_t end = source_.find('}', at_);
          if (end == std::string_view::npos) return refuse("\\x{ without }");
          copy(end + 1 - at_);
          return Ok{};
        }
        return hexadecimal(2, false);
      case 'p':
      case 'P': {
        const size_t end = source_.find('}', at_);
        if (source_.substr(at_ + 2, 1) != "{" || end == std::string_view::npos)
          return refuse(source_.substr(at_, 3));
        copy(end + 1 - at_);
        return Ok{};
      }
      default:
        break;
    }
    const bool alike = std::string_view("nrtfaedDAzZ").find(c) != std::string_view::npos ||
                       (static_cast<unsigned char>(c) < 0x80 &&
                        std::ispunct(static_cast<unsigned char>(c)) != 0) ||
                       c == ' ';
    if (!alike || (in_class_ && (c == 'A' || c == 'z' || c == 'Z')))
      return refuse(source_.substr(at_, 2));
    copy(2);
    return Ok{};
  }

  // \uHHHH, or \xHH below 0x80 (above, Oniguruma means a raw byte).
  Status hexadecimal(size_t digits, bool any_value) {
    const std::string_view text = source_.substr(at_ + 2, digits);
    bool good = text.size() == digits && (any_value || text[0] < '8');
    for (const char d : text) good = good && std::isxdigit(static_cast<unsigned char>(d)) != 0;
    if (!good) return refuse(source_.substr(at_, 2 + digits));
    replace(2 + digits, "\\x{" + std::string(text) + "}");
    return Ok{};
  }

  void open_class() {
    in_class_ = true;
    copy(source_.substr(at_, 2) == "[^" ? 2 : 1);
    class_start_ = at_;
  }

  Status class_character(char c) {
    if (c == '[') return refuse("[ inside [...]");
    if (source_.substr(at_, 2) == "&&") return refuse("&&");
    if (c == ']') {
      if (at_ == class_start_) return refuse("[]");
      in_class_ = false;
    }
    copy(1);
    return Ok{};
  }

  Status group() {
    const std::string_view rest = source_.substr(at_);
    if (rest.starts_with("(*")) return refuse("(*");
    if (!rest.starts_with("(?")) {
      copy(1);
      return Ok{};
    }
    for (const std::string_view opening : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
      if (rest.starts_with(opening)) {
        copy(opening.size());
        return Ok{};
      }
    }
    return refuse(rest.substr(0, 4));
  }

  std::string_view source_;
  const std::string& where_;
  std::string out_;
  size_t at_ = 0;
  size_t class_start_ = 0;
  bool in_class_ = false;
};

}  // namespace

struct SplitPattern::Code {
  explicit Code(pcre2_code* compiled) : code(compiled) {}
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  ~Code() { pcre2_code_free(code); }
  pcre2_code* code;
};

SplitPattern::SplitPattern(std::string source, std::unique_ptr<Code> code)
    : source_(std::move(source)), code_(std::move(code)) {}
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;
SplitPattern::~SplitPattern() = default;

Result<std::string> translate_pattern(std::string_view source, const std::string& where) {
  return Translator(source, where).run();
}

Result<SplitPattern> SplitPattern::compile(std::string_view source, const std::string& where) {
  if (source.size() > kMaxPatternBytes) {
    return Error{ErrorCode::kUnsupported,
                 "a split pattern of " + std::to_string(source.size()) + " bytes; at most " +
                     std::to_string(kMaxPatternBytes) + " are read",
                 where};
  }
  CLO_ASSIGN(const std::string pattern, translate_pattern(source, where));
  return build(source, pattern, false, where);
}

Result<SplitPattern> SplitPattern::literal(std::string_view text, const std::string& where) {
  if (text.empty()) return Error{ErrorCode::kBadFile, "the split string is empty", where};
  return build(text, std::string(text), true, where);
}

Result<SplitPattern> SplitPattern::build(std::string_view source, const std::string& pattern,
                                         bool literal, const std::string& where) {
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  CLO_CHECK(context != nullptr);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), 100);
  // In Oniguruma ^ and $ always match at line ends.
  const uint32_t options = literal
                               ? PCRE2_UTF | PCRE2_LITERAL
                               : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  int fault = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   options, &fault, &offset, context.get());
  if (code == nullptr) {
    return Error{ErrorCode::kBadFile,
                 "the split pattern does not compile: " + pcre_message(fault) + " at byte " +
                     std::to_string(offset) + " of " + pattern,
                 where};
  }
  auto owned = std::make_unique<Code>(code);
  // A build of PCRE2 without JIT refuses here and pcre2_match interprets: slower, same matches.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return SplitPattern(std::string(source), std::move(owned));
}

Status SplitPattern::split(std::string_view text, std::vector<std::string_view>& pieces) const {
  thread_local Scratch scratch;
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t done = 0;    // everything before is in pieces
  size_t search = 0;  // where the next match may start
  while (search < text.size()) {
    const int found = pcre2_match(code_->code, subject, text.size(), search, PCRE2_NO_UTF_CHECK,
                                  scratch.data(), scratch.context());
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return Error{ErrorCode::kBadRequest,
                   "splitting the text into words stopped at byte " + std::to_string(search) +
                       " of " + std::to_string(text.size()) + ": " + pcre_message(found),
                   "text"};
    }
    const PCRE2_SIZE* place = pcre2_get_ovector_pointer(scratch.data());
    const size_t begin = place[0], end = place[1];
    CLO_CHECK(done <= begin && begin <= end && end <= text.size(), begin, end);
    if (begin > done) pieces.push_back(text.substr(done, begin - done));
    if (end > begin) pieces.push_back(text.substr(begin, end - begin));
    done = end;
    search = end;
    if (end == begin) {  // an empty match: go on one character later
      ++search;
      while (search < text.size() && (static_cast<unsigned char>(text[search]) & 0xC0) == 0x80)
        ++search;
    }
  }
  if (done < text.size()) pieces.push_back(text.substr(done));
  return Ok{};
}

}  // namespace clo
