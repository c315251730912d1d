#include "text/jinja/parser.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/try.h"
#include "text/jinja/expression_parser.h"

namespace clo::jinja {

namespace {

constexpr int kMaxStatementDepth = 40;
constexpr std::array<std::string_view, 5> kFunctions = {"range", "namespace", "dict",
                                                        "raise_exception", "strftime_now"};

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& where) : in_(std::move(tokens), where) {}

  Result<Body> run() {
    CLO_ASSIGN(Body body, parse_body({}));
    // A call of anything else could only fail: "undefined" is known now, not when it is reached.
    for (const auto& [name, line] : in_.called())
      if (!is_global_function(name) && !assigned_.contains(name))
        return in_.unsupported("the function \"" + name + "\"", line);
    return body;
  }

 private:
  using Kind = Statement::Kind;
  using Ends = std::vector<std::string_view>;

  Statement make(Kind kind) const {
    Statement statement;
    statement.kind = kind;
    statement.line = in_.current().line;
    return statement;
  }

  Status expect_block_end() {
    if (in_.current().kind != Token::Kind::kBlockEnd)
      return in_.bad("expected %}, found " + in_.found(), in_.current().line);
    in_.take();
    return Ok{};
  }

  // Statements up to a tag of `ends`, of which "{%" has been taken and the name is current; without
  // ends up to the end of the template.
  Result<Body> parse_body(const Ends& ends) {
    if (++depth_ > kMaxStatementDepth)
      return in_.unsupported(
          "nesting blocks deeper than " + std::to_string(kMaxStatementDepth) + " levels",
          in_.current().line);
    const int opened = in_.current().line;
    Body body;
    while (true) {
      const Token& token = in_.current();
      if (token.kind == Token::Kind::kEnd) {
        if (ends.empty()) break;
        return in_.bad(
            "the block opened here is not closed with {% " + std::string(ends.back()) + " %}",
            opened);
      }
      if (token.kind == Token::Kind::kText) {
        Statement text = make(Kind::kText);
        text.text = in_.take().text;
        body.push_back(std::move(text));
      } else if (token.kind == Token::Kind::kOutputBegin) {
        Statement output = make(Kind::kOutput);
        in_.take();
        CLO_ASSIGN(ExpressionPtr value, in_.parse_tuple(true));
        if (in_.current().kind != Token::Kind::kOutputEnd)
          return in_.bad("expected }}, found " + in_.found(), in_.current().line);
        in_.take();
        output.expressions.push_back(std::move(value));
        body.push_back(std::move(output));
      } else {
        in_.take();
        const Token& tag = in_.current();
        if (tag.kind != Token::Kind::kName)
          return in_.bad("expected the name of a tag, found " + in_.found(), tag.line);
        if (std::find(ends.begin(), ends.end(), tag.text) != ends.end()) break;
        CLO_TRY(parse_statement(body));
      }
    }
    --depth_;
    return body;
  }

  // A body after the rest of its opening tag.
  Result<Body> parse_block(const Ends& ends) {
    CLO_TRY(expect_block_end());
    return parse_body(ends);
  }

  Status parse_statement(Body& body) {
    const std::string name = in_.current().text;
    const int line = in_.current().line;
    if (name == "if") return parse_if(body);
    if (name == "for") return parse_for(body);
    if (name == "set") return parse_set(body);
    if (name == "macro") return parse_macro(body);
    if (name == "break" || name == "continue") {
      if (loops_ == 0) return in_.bad("{% " + name + " %} outside of a loop", line);
      body.push_back(make(name == "break" ? Kind::kBreak : Kind::kContinue));
      in_.take();
      return expect_block_end();
    }
    if (name == "generation") {  // marks what an assistant wrote, for training: its text counts
      in_.take();
      CLO_ASSIGN(Body inner, parse_block({"endgeneration"}));
      in_.take();
      std::move(inner.begin(), inner.end(), std::back_inserter(body));
      return expect_block_end();
    }
    constexpr std::string_view kKnown[] = {"block",      "extends", "include", "import", "from",
                                           "with",       "call",    "filter",  "do",     "print",
                                           "autoescape", "trans",   "debug"};
    for (const std::string_view known : kKnown)
      if (name == known) return in_.unsupported("the tag {% " + name + " %}", line);
    return in_.bad("unexpected tag {% " + name + " %}", line);
  }

  Status parse_if(Body& body) {
    Statement statement = make(Kind::kIf);
    in_.take();
    while (true) {
      CLO_ASSIGN(ExpressionPtr condition, in_.parse_tuple(false));
      statement.expressions.push_back(std::move(condition));
      CLO_ASSIGN(Body branch, parse_block({"elif", "else", "endif"}));
      statement.bodies.push_back(std::move(branch));
      const Token end = in_.take();
      if (end.is_name("elif")) continue;
      if (end.is_name("else")) {
        CLO_ASSIGN(Body otherwise, parse_block({"endif"}));
        statement.bodies.push_back(std::move(otherwise));
        in_.take();
      }
      break;
    }
    body.push_back(std::move(statement));
    return expect_block_end();
  }

  // a / a, b / (a, b) / namespace.attribute
  Status parse_targets(Statement& statement, bool with_namespace) {
    const bool bracketed = in_.skip_symbol("(");
    statement.unpacks = bracketed;
    while (true) {
      const int line = in_.current().line;
      Statement::Target target;
      CLO_ASSIGN(target.name, in_.expect_name());
      if (in_.current().is_symbol(".")) {
        in_.take();
        if (!with_namespace) return in_.unsupported("an attribute as the target of a loop", line);
        CLO_ASSIGN(target.attribute, in_.expect_name());
      } else {
        for (const std::string_view reserved :
             {"true", "True", "false", "False", "none", "None", "loop"})
          if (target.name == reserved)
            return in_.bad("cannot assign to \"" + target.name + "\"", line);
        assigned_.insert(target.name);
      }
      statement.targets.push_back(std::move(target));
      if (!in_.skip_symbol(",")) break;
      statement.unpacks = true;
      if (in_.current().kind != Token::Kind::kName || in_.current().is_name("in")) break;
    }
    if (bracketed) CLO_TRY(in_.expect_symbol(")"));
    if (bracketed && statement.targets.size() == 1)
      return in_.unsupported("a target in brackets", statement.line);
    return Ok{};
  }

  Status parse_for(Body& body) {
    Statement statement = make(Kind::kFor);
    in_.take();
    CLO_TRY(parse_targets(statement, false));
    if (!in_.skip_name("in"))
      return in_.bad("expected \"in\", found " + in_.found(), in_.current().line);
    CLO_ASSIGN(ExpressionPtr sequence, in_.parse_tuple(false));
    ExpressionPtr filter;
    if (in_.skip_name("if")) {
      CLO_ASSIGN(filter, in_.parse_expression());
    }
    if (in_.current().is_name("recursive"))
      return in_.unsupported("a recursive loop", statement.line);
    statement.expressions.push_back(std::move(sequence));
    statement.expressions.push_back(std::move(filter));
    ++loops_;
    CLO_ASSIGN(Body loop, parse_block({"else", "endfor"}));
    --loops_;
    statement.bodies.push_back(std::move(loop));
    Body otherwise;
    if (in_.take().text == "else") {
      CLO_ASSIGN(otherwise, parse_block({"endfor"}));
      in_.take();
    }
    statement.bodies.push_back(std::move(otherwise));
    body.push_back(std::move(statement));
    return expect_block_end();
  }

  Status parse_set(Body& body) {
    Statement statement = make(Kind::kSet);
    in_.take();
    CLO_TRY(parse_targets(statement, true));
    if (in_.skip_symbol("=")) {
      CLO_ASSIGN(ExpressionPtr value, in_.parse_tuple(true));
      statement.expressions.push_back(std::move(value));
    } else {
      statement.kind = Kind::kSetBlock;
      if (in_.current().is_symbol("|"))
        return in_.unsupported("a filter on a {% set %} block", statement.line);
      if (statement.unpacks) return in_.bad("a {% set %} block has one target", statement.line);
      ++set_blocks_;
      CLO_ASSIGN(Body block, parse_block({"endset"}));
      --set_blocks_;
      statement.bodies.push_back(std::move(block));
      in_.take();
    }
    body.push_back(std::move(statement));
    return expect_block_end();
  }

  Status parse_macro(Body& body) {
    Statement statement = make(Kind::kMacro);
    // There it would see the variables of the place where it stands.
    if (loops_ > 0 || set_blocks_ > 0 || in_macro_)
      return in_.unsupported("a macro inside a loop, a {% set %} block or a macro", statement.line);
    in_.take();
    CLO_ASSIGN(statement.text, in_.expect_name());
    assigned_.insert(statement.text);
    CLO_TRY(in_.expect_symbol("("));
    while (!in_.current().is_symbol(")")) {
      if (!statement.targets.empty()) CLO_TRY(in_.expect_symbol(","));
      Statement::Target parameter;
      CLO_ASSIGN(parameter.name, in_.expect_name());
      assigned_.insert(parameter.name);
      ExpressionPtr otherwise;
      if (in_.skip_symbol("=")) {
        CLO_ASSIGN(otherwise, in_.parse_expression());
      } else if (!statement.expressions.empty() && statement.expressions.back() != nullptr) {
        return in_.bad("a parameter without a default follows one with a default", statement.line);
      }
      statement.targets.push_back(std::move(parameter));
      statement.expressions.push_back(std::move(otherwise));
    }
    in_.take();
    in_macro_ = true;
    CLO_ASSIGN(Body block, parse_block({"endmacro"}));
    in_macro_ = false;
    statement.bodies.push_back(std::move(block));
    in_.take();
    body.push_back(std::move(statement));
    return expect_block_end();
  }

  ExpressionParser in_;
  std::set<std::string> assigned_;  // names that a set, loop or macro gives a value
  int depth_ = 0;
  int loops_ = 0;
  int set_blocks_ = 0;
  bool in_macro_ = false;
};

}  // namespace

bool is_global_function(std::string_view name) {
  return std::find(kFunctions.begin(), kFunctions.end(), name) != kFunctions.end();
}

Result<Body> parse_template(std::string_view source, const std::string& where) {
  CLO_ASSIGN(std::vector<Token> tokens, tokenize(source, where));
  return Parser(std::move(tokens), where).run();
}

}  // namespace clo::jinja
