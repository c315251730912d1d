#pragma once
// The tree of a parsed template. Built once by the parser, never changed, shared by renderings on
// any thread. The parser bounds its depth, so walking and destroying it may recurse.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

namespace clo::jinja {

enum class Operator {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,
};

struct Builtin;  // builtins.h

struct Expression {
  enum class Kind {
    kConstant,     // constant
    kName,         // name
    kList,         // parts: items
    kTuple,        // parts: items
    kDict,         // parts: key, value, key, value, ...
    kNegate,       // parts: operand
    kPlus,         // parts: operand
    kNot,          // parts: operand
    kAnd,          // parts: left, right
    kOr,           // parts: left, right
    kBinary,       // operators[0]; parts: left, right
    kConcat,       // parts: operands of ~
    kCompare,      // parts[0] operators[0] parts[1] operators[1] parts[2] ...
    kConditional,  // parts: condition, then, else or null
    kAttribute,    // parts: object; name
    kItem,         // parts: object, index
    kSlice,        // parts: object, begin, end, step; each but the object may be null
    kCall,         // a function or macro: name; parts: arguments; keywords
    kMethod,       // builtin; parts: object, arguments
    kFilter,       // builtin; parts: value, arguments; keywords
    kTest,         // builtin; parts: value, arguments
  };
  Kind kind = Kind::kConstant;
  int line = 1;
  int depth = 1;
  std::string name;
  Value constant;
  std::vector<Operator> operators;
  std::vector<std::unique_ptr<Expression>> parts;
  // Names of the last arguments in parts, when they were given by keyword.
  std::vector<std::string> keywords;
  const Builtin* builtin = nullptr;
};
using ExpressionPtr = std::unique_ptr<Expression>;

struct Statement;
using Body = std::vector<Statement>;

struct Statement {
  enum class Kind {
    kText,      // text
    kOutput,    // expressions[0]
    kIf,        // expressions: conditions; bodies: one each, and one more for else
    kFor,       // targets; expressions: sequence, filter or null; bodies: loop, else
    kSet,       // targets; expressions[0]
    kSetBlock,  // targets; bodies[0]
    kMacro,     // text: name; targets: parameters; expressions: defaults or null; bodies[0]
    kBreak,
    kContinue,
  };
  struct Target {
    std::string name;
    std::string attribute;  // of a namespace; empty for a plain name
  };
  Kind kind = Kind::kText;
  int line = 1;
  std::string text;
  std::vector<Target> targets;
  bool unpacks = false;  // targets were written as a tuple: "a, b" or "a,"
  std::vector<ExpressionPtr> expressions;
  std::vector<Body> bodies;
};

}  // namespace clo::jinja
