#include "text/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "base/try.h"
#include "base/utf8.h"
#include "text/jinja/strings.h"

namespace clo::jinja {

namespace {

constexpr auto kNone = std::string_view::npos;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

// \r\n and \r become \n; one newline at the very end is dropped.
std::string normalize_newlines(std::string_view source) {
  std::string made;
  made.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      made += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      made += source[i];
    }
  }
  if (made.ends_with('\n')) made.pop_back();
  return made;
}

class Lexer {
 public:
  Lexer(std::string source, const std::string& where) : source_(std::move(source)), where_(where) {}

  Result<std::vector<Token>> run() {
    while (at_ < source_.size()) {
      const size_t tag = find_tag(at_);
      const std::string_view text = rest().substr(0, tag == kNone ? kNone : tag - at_);
      if (tag == kNone) {
        add_text(text);
        at_ = source_.size();
        break;
      }
      CLO_TRY(read_tag(text, tag));
    }
    Token end = make(Token::Kind::kEnd);
    tokens_.push_back(std::move(end));
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  Error bad(const std::string& message, int line) const {
    return Error{ErrorCode::kBadFile, "line " + std::to_string(line) + ": " + message, where_};
  }
  // Moves past `count` bytes, counting lines.
  void advance(size_t count) {
    line_ +=
        static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(at_),
                                    source_.begin() + static_cast<ptrdiff_t>(at_ + count), '\n'));
    at_ += count;
  }
  Token make(Token::Kind kind, std::string text = {}) const {
    Token token;
    token.kind = kind;
    token.line = line_;
    token.text = std::move(text);
    return token;
  }
  void add_text(std::string_view text) {
    if (!text.empty()) tokens_.push_back(make(Token::Kind::kText, std::string(text)));
  }

  size_t find_tag(size_t from) const {
    for (size_t at = source_.find('{', from); at != kNone; at = source_.find('{', at + 1)) {
      const char next = at + 1 < source_.size() ? source_[at + 1] : '\0';
      if (next == '{' || next == '%' || next == '#') return at;
    }
    return kNone;
  }

  // The text before a tag after the tag's sign ('-', '+' or none) has had its effect.
  std::string_view strip_before(std::string_view text, char sign, bool is_output) const {
    if (sign == '-') return strip(text, Side::kRight);
    if (sign == '+' || is_output) return text;
    const size_t line_start = text.rfind('\n') + 1;  // npos + 1 is 0
    if (line_start == 0 && !line_starting_) return text;
    const bool only_space = strip(text.substr(line_start), Side::kLeft).empty();
    return only_space ? text.substr(0, line_start) : text;
  }

  // Past what the end of a tag takes with it: all white space after '-', else one newline.
  void skip_after(char sign, bool trims) {
    if (sign == '-') {
      const size_t before = rest().size();
      advance(before - strip(rest(), Side::kLeft).size());
    } else if (sign != '+' && trims && rest().starts_with('\n')) {
      advance(1);
    }
    line_starting_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  Status read_tag(std::string_view text, size_t tag) {
    const char type = source_[tag + 1];
    const char after = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    const char sign = after == '-' || after == '+' ? after : '\0';
    add_text(strip_before(text, sign, type == '{'));
    advance(tag - at_ + 2 + (sign != '\0' ? 1 : 0));
    if (type == '#') return skip_comment();
    if (type == '%' && starts_raw()) return read_raw();
    return read_code(type == '{');
  }

  Status skip_comment() {
    const int line = line_;
    const size_t end = source_.find("#}", at_);
    if (end == kNone) return bad("the comment opened here is not closed with #}", line);
    const char before = end > at_ ? source_[end - 1] : '\0';
    const char sign = before == '-' || before == '+' ? before : '\0';
    advance(end + 2 - at_);
    skip_after(sign, true);
    return Ok{};
  }

  // After "{%": whether this is {% raw %}.
  bool starts_raw() const {
    std::string_view inside = strip(rest(), Side::kLeft);
    if (!inside.starts_with("raw")) return false;
    inside = strip(inside.substr(3), Side::kLeft);
    return inside.starts_with("%}") || inside.starts_with("-%}");
  }

  Status read_raw() {
    const int line = line_;
    const size_t open_end = source_.find("%}", at_);
    const char open_sign = source_[open_end - 1] == '-' ? '-' : '\0';
    advance(open_end + 2 - at_);
    skip_after(open_sign, false);
    for (size_t tag = source_.find("{%", at_); tag != kNone; tag = source_.find("{%", tag + 1)) {
      std::string_view inside = std::string_view(source_).substr(tag + 2);
      const char first = inside.empty() ? '\0' : inside.front();
      const char sign = first == '-' || first == '+' ? first : '\0';
      if (sign != '\0') inside.remove_prefix(1);
      inside = strip(inside, Side::kLeft);
      if (!inside.starts_with("endraw")) continue;
      inside = strip(inside.substr(6), Side::kLeft);
      const char last = inside.empty() ? '\0' : inside.front();
      const char end_sign = last == '-' || last == '+' ? last : '\0';
      if (end_sign != '\0') inside.remove_prefix(1);
      if (!inside.starts_with("%}")) continue;
      add_text(strip_before(rest().substr(0, tag - at_), sign, false));
      advance(source_.size() - inside.size() + 2 - at_);
      skip_after(end_sign, true);
      return Ok{};
    }
    return bad("{% raw %} is not closed with {% endraw %}", line);
  }

  // The tokens of a {{ }} or {% %}, to its end.
  Status read_code(bool is_output) {
    using Kind = Token::Kind;
    const int opened = line_;
    const std::string_view closing = is_output ? "}}" : "%}";
    tokens_.push_back(make(is_output ? Kind::kOutputBegin : Kind::kBlockBegin));
    std::string open;  // brackets to close
    while (true) {
      advance(rest().size() - strip(rest(), Side::kLeft).size());
      if (rest().empty())
        return bad(std::string("the tag opened here is not closed with ") + std::string(closing),
                   opened);
      if (open.empty()) {
        const char first = rest().front();
        const bool signed_end =
            (first == '-' || (first == '+' && !is_output)) && rest().substr(1).starts_with(closing);
        if (signed_end || rest().starts_with(closing)) {
          tokens_.push_back(make(is_output ? Kind::kOutputEnd : Kind::kBlockEnd));
          advance(closing.size() + (signed_end ? 1 : 0));
          skip_after(signed_end ? first : '\0', !is_output);
          return Ok{};
        }
      }
      CLO_TRY(read_token(open));
    }
  }

  Status read_token(std::string& open) {
    const char c = rest().front();
    if (is_name_start(c)) {
      size_t length = 1;
      while (length < rest().size() && (is_name_start(rest()[length]) || is_digit(rest()[length])))
        ++length;
      tokens_.push_back(make(Token::Kind::kName, std::string(rest().substr(0, length))));
      advance(length);
      return Ok{};
    }
    if (is_digit(c)) return read_number();
    if (c == '\'' || c == '"') return read_string(c);
    return read_symbol(open);
  }

  Status read_number() {
    const auto digits = [&](size_t from) {
      size_t end = from;
      while (end < rest().size() && is_digit(rest()[end])) ++end;
      return end;
    };
    const auto at = [&](size_t i) { return i < rest().size() ? rest()[i] : '\0'; };
    size_t end = digits(0);
    const size_t integer_end = end;
    if (at(end) == '.' && is_digit(at(end + 1))) end = digits(end + 1);
    if (at(end) == 'e' || at(end) == 'E') {
      const size_t sign = at(end + 1) == '+' || at(end + 1) == '-' ? 1 : 0;
      if (is_digit(at(end + 1 + sign))) end = digits(end + 1 + sign);
    }
    const std::string text(rest().substr(0, end));
    Token token = make(end == integer_end ? Token::Kind::kInteger : Token::Kind::kFloat, text);
    const bool odd =
        is_name_start(at(end)) || (end == integer_end && text.size() > 1 && text[0] == '0' &&
                                   text.find_first_not_of('0') != std::string::npos);
    const char* last = text.data() + text.size();
    const auto result = end == integer_end ? std::from_chars(text.data(), last, token.integer)
                                           : std::from_chars(text.data(), last, token.real);
    if (odd || result.ec != std::errc() || result.ptr != last)
      return bad("expected a decimal number, found \"" + text + at(end) + "\"", line_);
    tokens_.push_back(std::move(token));
    advance(end);
    return Ok{};
  }

  Status read_string(char quote) {
    size_t end = 1;
    while (end < rest().size() && rest()[end] != quote) end += rest()[end] == '\\' ? 2 : 1;
    if (end >= rest().size()) return bad("a string is not closed", line_);
    Token token = make(Token::Kind::kString);
    CLO_ASSIGN(token.text, unescape(rest().substr(1, end - 1)));
    tokens_.push_back(std::move(token));
    advance(end + 1);
    return Ok{};
  }

  // Python's escapes in string literals.
  Result<std::string> unescape(std::string_view text) const {
    std::string made;
    while (!text.empty()) {
      if (text[0] != '\\') {
        made += text[0];
        text.remove_prefix(1);
        continue;
      }
      const char c = text[1];
      text.remove_prefix(2);
      constexpr std::string_view kLetters = "ntr\\'\"abfv";
      constexpr std::string_view kMeanings = "\n\t\r\\'\"\a\b\f\v";
      const size_t simple = kLetters.find(c);
      if (simple != kNone) {
        made += kMeanings[simple];
      } else if (c == 'x' || c == 'u' || c == 'U') {
        CLO_TRY(code_point(text, c == 'x' ? 2 : (c == 'u' ? 4 : 8), 16, made));
      } else if (c >= '0' && c <= '7') {
        std::string_view octal(text.data() - 1, text.size() + 1);
        size_t length = 1;
        while (length < 3 && length < octal.size() && octal[length] >= '0' && octal[length] <= '7')
          ++length;
        CLO_TRY(code_point(octal, length, 8, made));
        text = octal;
      } else if (c == 'N') {
        return bad("the escape \\N{...} in a string is not supported: use \\u", line_);
      } else if (c != '\n') {  // an escaped newline vanishes, unknown escapes stay
        made += '\\';
        made += c;
      }
    }
    return made;
  }

  Status code_point(std::string_view& text, size_t digits, int base, std::string& made) const {
    uint32_t code = 0;
    const std::string_view number = text.substr(0, digits);
    const auto result = std::from_chars(number.data(), number.data() + number.size(), code, base);
    const bool whole = number.size() == digits && result.ptr == number.data() + number.size();
    if (!whole || result.ec != std::errc() || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
      return bad("a string has a malformed escape", line_);
    append_utf8(code, made);
    text.remove_prefix(digits);
    return Ok{};
  }

  Status read_symbol(std::string& open) {
    constexpr std::array<std::string_view, 26> kSymbols = {
        "==", "!=", "<=", ">=", "//", "**", "+", "-", "*", "/", "%", "~", "(",
        ")",  "[",  "]",  "{",  "}",  "<",  ">", "=", ".", ":", "|", ",", ";"};
    for (const std::string_view symbol : kSymbols) {
      if (!rest().starts_with(symbol)) continue;
      if (symbol == "(" || symbol == "[" || symbol == "{") {
        open += symbol == "(" ? ')' : (symbol == "[" ? ']' : '}');
      } else if (symbol == ")" || symbol == "]" || symbol == "}") {
        if (open.empty() || open.back() != symbol[0])
          return bad("unexpected \"" + std::string(symbol) + "\"", line_);
        open.pop_back();
      }
      tokens_.push_back(make(Token::Kind::kSymbol, std::string(symbol)));
      advance(symbol.size());
      return Ok{};
    }
    const std::string_view character = rest().substr(0, decode_utf8(rest()).length);
    return bad("unexpected character \"" + std::string(character) + "\"", line_);
  }

  std::string source_;
  const std::string& where_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // the text after the last tag begins a line
};

}  // namespace

Result<std::vector<Token>> tokenize(std::string_view source, const std::string& where) {
  return Lexer(normalize_newlines(source), where).run();
}

}  // namespace clo::jinja
