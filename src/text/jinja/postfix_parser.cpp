// The rest of ExpressionParser: what may follow a value (attributes, subscripts, calls, filters and
// tests) and the check that every name and argument in it is known.
#include <algorithm>

#include "base/try.h"
#include "text/jinja/builtins.h"
#include "text/jinja/expression_parser.h"

namespace clo::jinja {

Result<ExpressionPtr> ExpressionParser::parse_postfix(ExpressionPtr made) {
  while (true) {
    if (current().is_symbol(".")) {
      CLO_ASSIGN(made, parse_dot(std::move(made)));
    } else if (current().is_symbol("[")) {
      CLO_ASSIGN(made, parse_subscript(std::move(made)));
    } else if (current().is_symbol("(")) {
      CLO_ASSIGN(made, parse_call(std::move(made)));
    } else {
      return made;
    }
  }
}

Result<ExpressionPtr> ExpressionParser::parse_filters(ExpressionPtr made) {
  while (true) {
    if (current().is_symbol("|")) {
      CLO_ASSIGN(made, parse_filter(std::move(made)));
    } else if (current().is_name("is")) {
      CLO_ASSIGN(made, parse_test(std::move(made)));
    } else if (current().is_symbol("(")) {
      CLO_ASSIGN(made, parse_call(std::move(made)));
    } else {
      return made;
    }
  }
}

Result<ExpressionPtr> ExpressionParser::parse_dot(ExpressionPtr object) {
  ExpressionPtr node = make(Kind::kAttribute);
  take();
  if (current().kind == Token::Kind::kInteger) {
    node->kind = Kind::kItem;
    ExpressionPtr index = make(Kind::kConstant);
    index->constant = Value(take().integer);
    node->parts.push_back(std::move(object));
    node->parts.push_back(std::move(index));
    return finish(std::move(node));
  }
  CLO_ASSIGN(node->name, expect_name());
  if (node->name.starts_with("__"))
    return unsupported("the attribute \"" + node->name + "\"", node->line);
  constexpr std::string_view kLoopFunctions[] = {"cycle", "changed"};
  if (object->kind == Kind::kName && object->name == "loop")
    for (const std::string_view function : kLoopFunctions)
      if (node->name == function) return unsupported("loop." + std::string(function), node->line);
  node->parts.push_back(std::move(object));
  return finish(std::move(node));
}

Result<ExpressionPtr> ExpressionParser::parse_subscript(ExpressionPtr object) {
  ExpressionPtr node = make(Kind::kItem);
  take();
  node->parts.push_back(std::move(object));
  ExpressionPtr bounds[3];
  int colons = 0;
  while (!current().is_symbol("]")) {
    if (skip_symbol(":")) {
      if (++colons > 2) return bad("a slice has at most two \":\"", node->line);
      continue;
    }
    if (current().is_symbol(",")) return unsupported("a subscript with commas", node->line);
    if (bounds[colons] != nullptr) return bad("expected \"]\", found " + found(), current().line);
    CLO_ASSIGN(bounds[colons], parse_expression());
  }
  take();
  if (colons == 0 && bounds[0] == nullptr) return bad("a subscript is empty", node->line);
  if (colons > 0) node->kind = Kind::kSlice;
  for (int i = 0; i < (colons > 0 ? 3 : 1); ++i) node->parts.push_back(std::move(bounds[i]));
  return finish(std::move(node));
}

Status ExpressionParser::parse_arguments(Expression& call) {
  CLO_TRY(expect_symbol("("));
  bool first = true;
  while (!current().is_symbol(")")) {
    if (!first) CLO_TRY(expect_symbol(","));
    if (current().is_symbol(")")) break;
    first = false;
    if (current().is_symbol("*") || current().is_symbol("**"))
      return unsupported("\"" + current().text + "\" in the arguments of a call", current().line);
    const bool by_keyword = current().kind == Token::Kind::kName && look_ahead().is_symbol("=");
    if (by_keyword) {
      call.keywords.push_back(take().text);
      take();
    } else if (!call.keywords.empty()) {
      return bad("an argument without a name follows one with a name", current().line);
    }
    CLO_ASSIGN(ExpressionPtr argument, parse_expression());
    call.parts.push_back(std::move(argument));
  }
  take();
  return Ok{};
}

// Whether the builtin takes these arguments. `kind` is "filter", "test" or "method".
Status ExpressionParser::check_arguments(const Expression& call, std::string_view kind) const {
  const auto& parameters = call.builtin->parameters;
  const std::string what = "the " + std::string(kind) + " \"" + call.name + "\"";
  const size_t positional = call.parts.size() - 1 - call.keywords.size();
  if (positional > parameters.size())
    return unsupported(what + " with " + std::to_string(positional) + " arguments", call.line);
  std::vector<bool> given(parameters.size());
  std::fill_n(given.begin(), positional, true);
  for (const std::string& keyword : call.keywords) {
    const auto place = std::find(parameters.begin(), parameters.end(), keyword);
    if (place == parameters.end() || kind == "method")
      return unsupported(what + " with an argument named \"" + keyword + "\"", call.line);
    const auto index = static_cast<size_t>(place - parameters.begin());
    if (given[index]) return bad(what + " has two values for \"" + keyword + "\"", call.line);
    given[index] = true;
  }
  for (size_t i = 0; i < call.builtin->required; ++i)
    if (!given[i])
      return bad(what + " needs the argument \"" + std::string(parameters[i]) + "\"", call.line);
  return Ok{};
}

// map, select and their like take the name of a filter or test: it must be a known one, too.
Status ExpressionParser::check_named_function(const Expression& call) const {
  const bool by_attribute = call.name == "selectattr" || call.name == "rejectattr";
  const bool is_map = call.name == "map";
  if (!by_attribute && !is_map && call.name != "select" && call.name != "reject") return Ok{};
  const size_t place = by_attribute ? 2 : 1;
  if (call.parts.size() - call.keywords.size() <= place) return Ok{};
  const Expression& named = *call.parts[place];
  const std::string* name = named.constant.as_text();
  if (named.kind != Kind::kConstant || name == nullptr)
    return unsupported("the filter \"" + call.name + "\" with a computed name", call.line);
  if ((is_map ? find_filter(*name) : find_test(*name)) == nullptr)
    return unsupported((is_map ? "the filter \"" : "the test \"") + *name + "\"", call.line);
  return Ok{};
}

Result<ExpressionPtr> ExpressionParser::parse_filter(ExpressionPtr value) {
  ExpressionPtr node = make(Kind::kFilter);
  take();
  CLO_ASSIGN(node->name, expect_name());
  node->builtin = find_filter(node->name);
  if (node->builtin == nullptr) return unsupported("the filter \"" + node->name + "\"", node->line);
  node->parts.push_back(std::move(value));
  if (current().is_symbol("(")) CLO_TRY(parse_arguments(*node));
  CLO_TRY(check_arguments(*node, "filter"));
  for (const std::string& keyword : node->keywords)
    if (keyword == "name" || keyword == "argument" || keyword == "argument2")
      return unsupported("the argument \"" + keyword + "\" by name", node->line);
  CLO_TRY(check_named_function(*node));
  return finish(std::move(node));
}

Result<ExpressionPtr> ExpressionParser::parse_test(ExpressionPtr value) {
  ExpressionPtr node = make(Kind::kTest);
  take();
  const bool negated = skip_name("not");
  CLO_ASSIGN(node->name, expect_name());
  node->builtin = find_test(node->name);
  if (node->builtin == nullptr) return unsupported("the test \"" + node->name + "\"", node->line);
  node->parts.push_back(std::move(value));
  const Token& next = current();
  const bool is_operand = next.kind == Token::Kind::kString || next.kind == Token::Kind::kInteger ||
                          next.kind == Token::Kind::kFloat || next.is_symbol("[") ||
                          next.is_symbol("{") || next.kind == Token::Kind::kName;
  if (next.is_name("is")) return bad("tests cannot be chained with \"is\"", next.line);
  if (next.is_symbol("(")) {
    CLO_TRY(parse_arguments(*node));
  } else if (is_operand && !next.is_name("else") && !next.is_name("or") && !next.is_name("and")) {
    CLO_ASSIGN(ExpressionPtr operand, parse_primary());
    CLO_ASSIGN(operand, parse_postfix(std::move(operand)));
    node->parts.push_back(std::move(operand));
  }
  CLO_TRY(check_arguments(*node, "test"));
  CLO_ASSIGN(ExpressionPtr test, finish(std::move(node)));
  if (!negated) return test;
  ExpressionPtr inverse = make(Kind::kNot);
  inverse->parts.push_back(std::move(test));
  return finish(std::move(inverse));
}

Result<ExpressionPtr> ExpressionParser::parse_call(ExpressionPtr callee) {
  const int line = current().line;
  if (callee->kind == Kind::kAttribute) {
    callee->kind = Kind::kMethod;
    callee->builtin = find_method(callee->name);
    if (callee->builtin == nullptr) return unsupported("the method \"" + callee->name + "\"", line);
    CLO_TRY(parse_arguments(*callee));
    CLO_TRY(check_arguments(*callee, "method"));
    return finish(std::move(callee));
  }
  if (callee->kind != Kind::kName) return unsupported("calling the result of an expression", line);
  callee->kind = Kind::kCall;
  called_.emplace_back(callee->name, line);
  CLO_TRY(parse_arguments(*callee));
  return finish(std::move(callee));
}

}  // namespace clo::jinja
