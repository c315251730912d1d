#pragma once
// The part of the parser that reads expressions, with Jinja's grammar and precedence. Holds the
// place in the token stream; parser.cpp builds statements on it. Private to jinja/.
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "clo/result.h"
#include "text/jinja/ast.h"
#include "text/jinja/lexer.h"

namespace clo::jinja {

class ExpressionParser {
 public:
  // Requires: the tokens end with kEnd.
  ExpressionParser(std::vector<Token> tokens, std::string where)
      : tokens_(std::move(tokens)), where_(std::move(where)) {}

  const Token& current() const { return tokens_[at_]; }
  const Token& look_ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token take();
  bool skip_symbol(std::string_view symbol);
  bool skip_name(std::string_view name);
  Status expect_symbol(std::string_view symbol);
  Result<std::string> expect_name();

  Error bad(const std::string& message, int line) const;
  Error unsupported(const std::string& construct, int line) const;
  // What the current token looks like, for messages.
  std::string found() const;

  // An expression, or a tuple of several with commas between. Conditional expressions are left out
  // where a statement has an `if` of its own.
  Result<ExpressionPtr> parse_tuple(bool with_condition);
  Result<ExpressionPtr> parse_expression();

  // Functions that the template calls by name, with the line, to be looked up when all macros are
  // known.
  const std::vector<std::pair<std::string, int>>& called() const { return called_; }

 private:
  using Kind = Expression::Kind;
  struct Nest;  // counts recursion

  Result<ExpressionPtr> finish(ExpressionPtr made) const;
  ExpressionPtr make(Kind kind) const;
  Result<ExpressionPtr> parse_condition();
  Result<ExpressionPtr> parse_or();
  Result<ExpressionPtr> parse_and();
  Result<ExpressionPtr> parse_not();
  Result<ExpressionPtr> parse_compare();
  Result<ExpressionPtr> parse_sum();
  Result<ExpressionPtr> parse_concat();
  Result<ExpressionPtr> parse_product();
  Result<ExpressionPtr> parse_power();
  Result<ExpressionPtr> parse_unary(bool with_filters);
  Result<ExpressionPtr> parse_primary();
  Result<ExpressionPtr> parse_parenthesis();
  Result<ExpressionPtr> parse_list();
  Result<ExpressionPtr> parse_dict();
  Result<ExpressionPtr> parse_postfix(ExpressionPtr made);
  Result<ExpressionPtr> parse_filters(ExpressionPtr made);
  Result<ExpressionPtr> parse_filter(ExpressionPtr value);
  Result<ExpressionPtr> parse_test(ExpressionPtr value);
  Result<ExpressionPtr> parse_dot(ExpressionPtr object);
  Result<ExpressionPtr> parse_subscript(ExpressionPtr object);
  Result<ExpressionPtr> parse_call(ExpressionPtr callee);
  Status parse_arguments(Expression& call);
  Status check_arguments(const Expression& call, std::string_view kind) const;
  Status check_named_function(const Expression& call) const;

  std::vector<Token> tokens_;
  std::string where_;
  size_t at_ = 0;
  int nesting_ = 0;
  std::vector<std::pair<std::string, int>> called_;
};

}  // namespace clo::jinja
