#include "text/jinja/expression_parser.h"

#include <algorithm>

#include "base/try.h"
#include "text/jinja/builtins.h"

namespace clo::jinja {

namespace {

// Bounds recursion over the tree: chains such as a + b + c nest as well as brackets do.
constexpr int kMaxDepth = 100;

struct Spelled {
  std::string_view symbol;
  Operator op;
};
constexpr Spelled kComparisons[] = {
    {"==", Operator::kEqual},     {"!=", Operator::kNotEqual}, {"<", Operator::kLess},
    {"<=", Operator::kLessEqual}, {">", Operator::kGreater},   {">=", Operator::kGreaterEqual},
};
constexpr Spelled kProducts[] = {
    {"*", Operator::kMultiply},
    {"/", Operator::kDivide},
    {"//", Operator::kFloorDivide},
    {"%", Operator::kModulo},
};

template <size_t N>
const Spelled* find_operator(const Spelled (&table)[N], const Token& token) {
  for (const Spelled& entry : table)
    if (token.is_symbol(entry.symbol)) return &entry;
  return nullptr;
}

}  // namespace

struct ExpressionParser::Nest {
  explicit Nest(int& depth) : depth_(depth) { ++depth_; }
  Nest(const Nest&) = delete;
  Nest& operator=(const Nest&) = delete;
  ~Nest() { --depth_; }
  int& depth_;
};

Token ExpressionParser::take() {
  Token token = tokens_[at_];
  if (at_ + 1 < tokens_.size()) ++at_;
  return token;
}

bool ExpressionParser::skip_symbol(std::string_view symbol) {
  if (!current().is_symbol(symbol)) return false;
  take();
  return true;
}

bool ExpressionParser::skip_name(std::string_view name) {
  if (!current().is_name(name)) return false;
  take();
  return true;
}

Status ExpressionParser::expect_symbol(std::string_view symbol) {
  if (skip_symbol(symbol)) return Ok{};
  return bad("expected \"" + std::string(symbol) + "\", found " + found(), current().line);
}

Result<std::string> ExpressionParser::expect_name() {
  if (current().kind != Token::Kind::kName)
    return bad("expected a name, found " + found(), current().line);
  return take().text;
}

Error ExpressionParser::bad(const std::string& message, int line) const {
  return Error{ErrorCode::kBadFile, "line " + std::to_string(line) + ": " + message, where_};
}

Error ExpressionParser::unsupported(const std::string& construct, int line) const {
  return Error{
      ErrorCode::kUnsupported,
      "line " + std::to_string(line) + ": " + construct + " is not supported in chat templates",
      where_};
}

std::string ExpressionParser::found() const {
  switch (current().kind) {
    case Token::Kind::kOutputEnd:
      return "}}";
    case Token::Kind::kBlockEnd:
      return "%}";
    case Token::Kind::kEnd:
      return "the end of the template";
    case Token::Kind::kString:
      return "a string";
    default:
      return "\"" + current().text + "\"";
  }
}

ExpressionPtr ExpressionParser::make(Kind kind) const {
  auto made = std::make_unique<Expression>();
  made->kind = kind;
  made->line = current().line;
  return made;
}

// Sets the depth of a node whose parts are complete.
Result<ExpressionPtr> ExpressionParser::finish(ExpressionPtr made) const {
  for (const ExpressionPtr& part : made->parts)
    if (part != nullptr) made->depth = std::max(made->depth, part->depth + 1);
  if (made->depth > kMaxDepth)
    return unsupported("an expression nested deeper than " + std::to_string(kMaxDepth) + " levels",
                       made->line);
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_tuple(bool with_condition) {
  const auto parse = [&] { return with_condition ? parse_condition() : parse_or(); };
  CLO_ASSIGN(ExpressionPtr first, parse());
  if (!current().is_symbol(",")) return first;
  ExpressionPtr tuple = make(Kind::kTuple);
  tuple->parts.push_back(std::move(first));
  while (skip_symbol(",")) {
    const Token::Kind next = current().kind;
    if (next == Token::Kind::kOutputEnd || next == Token::Kind::kBlockEnd ||
        current().is_symbol(")"))
      break;
    CLO_ASSIGN(ExpressionPtr item, parse());
    tuple->parts.push_back(std::move(item));
  }
  return finish(std::move(tuple));
}

Result<ExpressionPtr> ExpressionParser::parse_expression() { return parse_condition(); }

Result<ExpressionPtr> ExpressionParser::parse_condition() {
  const Nest nest(nesting_);
  if (nesting_ > kMaxDepth)
    return unsupported("an expression nested deeper than " + std::to_string(kMaxDepth) + " levels",
                       current().line);
  CLO_ASSIGN(ExpressionPtr made, parse_or());
  while (current().is_name("if")) {
    ExpressionPtr node = make(Kind::kConditional);
    take();
    CLO_ASSIGN(ExpressionPtr condition, parse_or());
    ExpressionPtr otherwise;
    if (skip_name("else")) {
      CLO_ASSIGN(otherwise, parse_condition());
    }
    node->parts.push_back(std::move(condition));
    node->parts.push_back(std::move(made));
    node->parts.push_back(std::move(otherwise));
    CLO_ASSIGN(made, finish(std::move(node)));
  }
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_or() {
  CLO_ASSIGN(ExpressionPtr made, parse_and());
  while (current().is_name("or")) {
    ExpressionPtr node = make(Kind::kOr);
    take();
    CLO_ASSIGN(ExpressionPtr right, parse_and());
    node->parts.push_back(std::move(made));
    node->parts.push_back(std::move(right));
    CLO_ASSIGN(made, finish(std::move(node)));
  }
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_and() {
  CLO_ASSIGN(ExpressionPtr made, parse_not());
  while (current().is_name("and")) {
    ExpressionPtr node = make(Kind::kAnd);
    take();
    CLO_ASSIGN(ExpressionPtr right, parse_not());
    node->parts.push_back(std::move(made));
    node->parts.push_back(std::move(right));
    CLO_ASSIGN(made, finish(std::move(node)));
  }
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_not() {
  if (!current().is_name("not")) return parse_compare();
  const Nest nest(nesting_);
  if (nesting_ > kMaxDepth) return unsupported("such a long chain of \"not\"", current().line);
  ExpressionPtr node = make(Kind::kNot);
  take();
  CLO_ASSIGN(ExpressionPtr operand, parse_not());
  node->parts.push_back(std::move(operand));
  return finish(std::move(node));
}

Result<ExpressionPtr> ExpressionParser::parse_compare() {
  CLO_ASSIGN(ExpressionPtr first, parse_sum());
  ExpressionPtr node = make(Kind::kCompare);
  node->parts.push_back(std::move(first));
  while (true) {
    if (const Spelled* entry = find_operator(kComparisons, current())) {
      take();
      node->operators.push_back(entry->op);
    } else if (skip_name("in")) {
      node->operators.push_back(Operator::kIn);
    } else if (current().is_name("not") && look_ahead().is_name("in")) {
      take();
      take();
      node->operators.push_back(Operator::kNotIn);
    } else {
      break;
    }
    CLO_ASSIGN(ExpressionPtr next, parse_sum());
    node->parts.push_back(std::move(next));
  }
  if (node->operators.empty()) return std::move(node->parts.front());
  return finish(std::move(node));
}

Result<ExpressionPtr> ExpressionParser::parse_sum() {
  CLO_ASSIGN(ExpressionPtr made, parse_concat());
  while (current().is_symbol("+") || current().is_symbol("-")) {
    ExpressionPtr node = make(Kind::kBinary);
    node->operators.push_back(take().text == "+" ? Operator::kAdd : Operator::kSubtract);
    CLO_ASSIGN(ExpressionPtr right, parse_concat());
    node->parts.push_back(std::move(made));
    node->parts.push_back(std::move(right));
    CLO_ASSIGN(made, finish(std::move(node)));
  }
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_concat() {
  CLO_ASSIGN(ExpressionPtr first, parse_product());
  if (!current().is_symbol("~")) return first;
  ExpressionPtr node = make(Kind::kConcat);
  node->parts.push_back(std::move(first));
  while (skip_symbol("~")) {
    CLO_ASSIGN(ExpressionPtr next, parse_product());
    node->parts.push_back(std::move(next));
  }
  return finish(std::move(node));
}

Result<ExpressionPtr> ExpressionParser::parse_product() {
  CLO_ASSIGN(ExpressionPtr made, parse_power());
  while (const Spelled* entry = find_operator(kProducts, current())) {
    ExpressionPtr node = make(Kind::kBinary);
    take();
    node->operators.push_back(entry->op);
    CLO_ASSIGN(ExpressionPtr right, parse_power());
    node->parts.push_back(std::move(made));
    node->parts.push_back(std::move(right));
    CLO_ASSIGN(made, finish(std::move(node)));
  }
  return made;
}

// Jinja groups a ** b ** c from the left, unlike Python.
Result<ExpressionPtr> ExpressionParser::parse_power() {
  CLO_ASSIGN(ExpressionPtr made, parse_unary(true));
  while (current().is_symbol("**")) {
    ExpressionPtr node = make(Kind::kBinary);
    take();
    node->operators.push_back(Operator::kPower);
    CLO_ASSIGN(ExpressionPtr right, parse_unary(true));
    node->parts.push_back(std::move(made));
    node->parts.push_back(std::move(right));
    CLO_ASSIGN(made, finish(std::move(node)));
  }
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_unary(bool with_filters) {
  const Nest nest(nesting_);
  if (nesting_ > kMaxDepth)
    return unsupported("an expression nested deeper than " + std::to_string(kMaxDepth) + " levels",
                       current().line);
  ExpressionPtr made;
  if (current().is_symbol("-") || current().is_symbol("+")) {
    ExpressionPtr node = make(current().is_symbol("-") ? Kind::kNegate : Kind::kPlus);
    take();
    CLO_ASSIGN(ExpressionPtr operand, parse_unary(false));
    node->parts.push_back(std::move(operand));
    CLO_ASSIGN(made, finish(std::move(node)));
  } else {
    CLO_ASSIGN(made, parse_primary());
  }
  CLO_ASSIGN(made, parse_postfix(std::move(made)));
  if (!with_filters) return made;
  return parse_filters(std::move(made));
}

Result<ExpressionPtr> ExpressionParser::parse_primary() {
  const Token& token = current();
  if (token.is_symbol("(")) return parse_parenthesis();
  if (token.is_symbol("[")) return parse_list();
  if (token.is_symbol("{")) return parse_dict();
  ExpressionPtr made = make(Kind::kConstant);
  switch (token.kind) {
    case Token::Kind::kInteger:
      made->constant = Value(take().integer);
      return made;
    case Token::Kind::kFloat:
      made->constant = Value(take().real);
      return made;
    case Token::Kind::kString: {
      std::string text = take().text;
      while (current().kind == Token::Kind::kString) text += take().text;
      made->constant = Value(std::move(text));
      return made;
    }
    case Token::Kind::kName:
      break;
    default:
      return bad("expected an expression, found " + found(), token.line);
  }
  const std::string name = take().text;
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    made->constant = Value(name == "true" || name == "True");
  } else if (name != "none" && name != "None") {
    made->kind = Kind::kName;
    made->name = name;
  }
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_parenthesis() {
  ExpressionPtr empty = make(Kind::kTuple);
  take();
  if (skip_symbol(")")) return empty;
  CLO_ASSIGN(ExpressionPtr made, parse_tuple(true));
  CLO_TRY(expect_symbol(")"));
  return made;
}

Result<ExpressionPtr> ExpressionParser::parse_list() {
  ExpressionPtr list = make(Kind::kList);
  take();
  while (!current().is_symbol("]")) {
    if (!list->parts.empty()) CLO_TRY(expect_symbol(","));
    if (current().is_symbol("]")) break;
    CLO_ASSIGN(ExpressionPtr item, parse_expression());
    list->parts.push_back(std::move(item));
  }
  take();
  return finish(std::move(list));
}

Result<ExpressionPtr> ExpressionParser::parse_dict() {
  ExpressionPtr dict = make(Kind::kDict);
  take();
  while (!current().is_symbol("}")) {
    if (!dict->parts.empty()) CLO_TRY(expect_symbol(","));
    if (current().is_symbol("}")) break;
    CLO_ASSIGN(ExpressionPtr key, parse_expression());
    CLO_TRY(expect_symbol(":"));
    CLO_ASSIGN(ExpressionPtr value, parse_expression());
    dict->parts.push_back(std::move(key));
    dict->parts.push_back(std::move(value));
  }
  take();
  return finish(std::move(dict));
}

}  // namespace clo::jinja
