#include "text/jinja/evaluator.h"

#include <algorithm>

#include "base/check.h"
#include "base/try.h"
#include "text/jinja/builtins.h"
#include "text/jinja/functions.h"
#include "text/jinja/operators.h"
#include "text/jinja/parser.h"

namespace clo::jinja {

namespace {

// Statements, expressions and macro calls nested in each other; bounds the stack of a rendering.
constexpr int kMaxDepth = 250;

enum class Flow { kNext, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(Inputs inputs, Work& work) : now_(inputs.now), work_(work) {
    frames_.emplace_back();
    for (auto& [name, value] : inputs.variables) frames_[0].emplace(name, std::move(value));
  }

  Result<std::string> render(const Body& body) {
    CLO_TRY(run(body));
    return std::move(out_);
  }

 private:
  using Frame = std::map<std::string, Value, std::less<>>;
  using Kind = Expression::Kind;

  // One level deeper while it lives.
  class Level {
   public:
    explicit Level(int& depth) : depth_(depth) { ++depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    ~Level() { --depth_; }

   private:
    int& depth_;
  };
  Status enter(int line) {
    work_.set_line(line);
    if (depth_ > kMaxDepth) return work_.fail("macros and blocks are nested too deeply");
    return work_.spend(1);
  }

  Result<Flow> run(const Body& body) {
    for (const Statement& statement : body) {
      CLO_ASSIGN(const Flow flow, run(statement));
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  Result<Flow> run(const Statement& statement) {
    const Level level(depth_);
    CLO_TRY(enter(statement.line));
    switch (statement.kind) {
      case Statement::Kind::kText:
        CLO_TRY(print(statement.text));
        return Flow::kNext;
      case Statement::Kind::kOutput: {
        CLO_ASSIGN(const Value value, evaluate(*statement.expressions[0]));
        CLO_ASSIGN(const std::string text, to_text(value, work_));
        CLO_TRY(print(text));
        return Flow::kNext;
      }
      case Statement::Kind::kIf:
        return run_if(statement);
      case Statement::Kind::kFor:
        return run_for(statement);
      case Statement::Kind::kSet: {
        CLO_ASSIGN(const Value value, evaluate(*statement.expressions[0]));
        CLO_TRY(assign(statement, value));
        return Flow::kNext;
      }
      case Statement::Kind::kSetBlock:
        return run_set_block(statement);
      case Statement::Kind::kMacro:
        frames_.back().insert_or_assign(statement.text, Value(Function{&statement, {}}));
        return Flow::kNext;
      case Statement::Kind::kBreak:
        return Flow::kBreak;
      case Statement::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  Status print(std::string_view text) {
    CLO_TRY(work_.spend_bytes(text.size()));
    out_ += text;
    return Ok{};
  }

  Result<Flow> run_if(const Statement& statement) {
    for (size_t i = 0; i < statement.expressions.size(); ++i) {
      CLO_ASSIGN(const Value condition, evaluate(*statement.expressions[i]));
      if (truthy(condition)) return run(statement.bodies[i]);
    }
    if (statement.bodies.size() > statement.expressions.size()) return run(statement.bodies.back());
    return Flow::kNext;
  }

  Status assign(const Statement& statement, const Value& value) {
    if (!statement.unpacks) return assign_one(statement.targets[0], value);
    CLO_ASSIGN(const Value::ListPtr parts, iterate(value, work_));
    if (parts->items.size() != statement.targets.size())
      return work_.fail("expected " + std::to_string(statement.targets.size()) +
                        " values to unpack, found " + std::to_string(parts->items.size()));
    for (size_t i = 0; i < statement.targets.size(); ++i)
      CLO_TRY(assign_one(statement.targets[i], parts->items[i]));
    return Ok{};
  }

  Status assign_one(const Statement::Target& target, const Value& value) {
    if (target.attribute.empty()) {
      frames_.back().insert_or_assign(target.name, value);
      return Ok{};
    }
    const Value* held = find(target.name);
    Namespace* space = held != nullptr ? held->as_namespace() : nullptr;
    if (space == nullptr)
      return work_.fail("\"" + target.name + "\" is not a namespace: its attributes cannot be set");
    return set_namespace_entry(*space, target.attribute, value, work_);
  }

  // The rounds of a loop: its items, less those its filter turns down. Jinja asks the filter before
  // each round instead; that differs only when a round changes a namespace that the filter reads.
  Result<Value::ListPtr> rounds(const Statement& statement) {
    CLO_ASSIGN(const Value sequence, evaluate(*statement.expressions[0]));
    CLO_ASSIGN(Value::ListPtr all, iterate(sequence, work_));
    if (statement.expressions[1] == nullptr) return all;
    List kept;
    for (const Value& item : all->items) {
      const Scope scope(frames_);
      CLO_TRY(assign(statement, item));
      CLO_ASSIGN(const Value keep, evaluate(*statement.expressions[1]));
      if (truthy(keep)) kept.items.push_back(item);
    }
    return Value::ListPtr(std::make_shared<const List>(std::move(kept)));
  }

  // A frame of variables while it lives.
  class Scope {
   public:
    explicit Scope(std::vector<Frame>& frames) : frames_(frames) { frames_.emplace_back(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() { frames_.pop_back(); }

   private:
    std::vector<Frame>& frames_;
  };

  Result<Flow> run_for(const Statement& statement) {
    CLO_ASSIGN(const Value::ListPtr items, rounds(statement));
    bool completed = false;
    for (size_t i = 0; i < items->items.size(); ++i) {
      const Scope scope(frames_);
      CLO_TRY(work_.spend(4));
      frames_.back().emplace("loop", Value(std::make_shared<const Loop>(Loop{items, i})));
      CLO_TRY(assign(statement, items->items[i]));
      CLO_ASSIGN(const Flow flow, run(statement.bodies[0]));
      if (flow == Flow::kBreak) break;
      if (flow == Flow::kNext) completed = true;
    }
    // In Jinja a round counts once its body has come to its end.
    if (completed) return Flow::kNext;
    const Scope scope(frames_);
    return run(statement.bodies[1]);
  }

  // Runs a body with its output put into `inner`.
  Result<Flow> capture(const Body& body, std::string& inner) {
    std::string outer = std::exchange(out_, {});
    Result<Flow> flow = run(body);
    inner = std::exchange(out_, std::move(outer));
    return flow;
  }

  Result<Flow> run_set_block(const Statement& statement) {
    std::string text;
    {
      const Scope scope(frames_);
      CLO_ASSIGN(const Flow flow, capture(statement.bodies[0], text));
      if (flow != Flow::kNext) return flow;
    }
    CLO_TRY(assign(statement, Value(std::move(text))));
    return Flow::kNext;
  }

  const Value* find(std::string_view name) const {
    for (auto frame = frames_.rbegin(); frame != frames_.rend(); ++frame) {
      const auto found = frame->find(name);
      if (found != frame->end()) return &found->second;
    }
    return nullptr;
  }

  Value look_up(const Expression& node) const {
    if (const Value* held = find(node.name)) return *held;
    if (is_global_function(node.name)) return Value(Function{nullptr, node.name});
    return Value::undefined("'" + node.name + "' is undefined");
  }

  Result<Value> evaluate(const Expression& node) {
    const Level level(depth_);
    CLO_TRY(enter(node.line));
    switch (node.kind) {
      case Kind::kConstant:
        return node.constant;
      case Kind::kName:
        return look_up(node);
      case Kind::kList:
      case Kind::kTuple: {
        CLO_ASSIGN(Values items, evaluate_parts(node, 0));
        return make_list(std::move(items), node.kind == Kind::kTuple, work_);
      }
      case Kind::kDict:
        return evaluate_dict(node);
      case Kind::kNegate:
      case Kind::kPlus:
      case Kind::kNot:
        return evaluate_unary(node);
      case Kind::kAnd:
      case Kind::kOr: {
        CLO_ASSIGN(Value left, evaluate(*node.parts[0]));
        if (truthy(left) == (node.kind == Kind::kOr)) return left;
        return evaluate(*node.parts[1]);
      }
      case Kind::kBinary: {
        CLO_ASSIGN(const Value left, evaluate(*node.parts[0]));
        CLO_ASSIGN(const Value right, evaluate(*node.parts[1]));
        work_.set_line(node.line);
        return binary(node.operators[0], left, right, work_);
      }
      case Kind::kConcat:
        return evaluate_concat(node);
      case Kind::kCompare:
        return evaluate_compare(node);
      case Kind::kConditional: {
        CLO_ASSIGN(const Value condition, evaluate(*node.parts[0]));
        if (truthy(condition)) return evaluate(*node.parts[1]);
        if (node.parts[2] != nullptr) return evaluate(*node.parts[2]);
        return Value::undefined("an inline if without else gave no value");
      }
      case Kind::kAttribute: {
        CLO_ASSIGN(const Value object, evaluate(*node.parts[0]));
        return get_attribute(object, node.name, work_);
      }
      case Kind::kItem: {
        CLO_ASSIGN(const Value object, evaluate(*node.parts[0]));
        CLO_ASSIGN(const Value key, evaluate(*node.parts[1]));
        return get_item(object, key, work_);
      }
      case Kind::kSlice:
        return evaluate_slice(node);
      case Kind::kCall:
        return evaluate_call(node);
      case Kind::kMethod:
      case Kind::kFilter:
      case Kind::kTest:
        return evaluate_builtin(node);
    }
    return Value();
  }

  Result<Values> evaluate_parts(const Expression& node, size_t first) {
    Values values;
    for (size_t i = first; i < node.parts.size(); ++i) {
      CLO_ASSIGN(Value value, evaluate(*node.parts[i]));
      values.push_back(std::move(value));
    }
    work_.set_line(node.line);
    return values;
  }

  Result<Value> evaluate_dict(const Expression& node) {
    CLO_ASSIGN(Values flat, evaluate_parts(node, 0));
    std::vector<std::pair<Value, Value>> entries;
    for (size_t i = 0; i + 1 < flat.size(); i += 2)
      entries.emplace_back(std::move(flat[i]), std::move(flat[i + 1]));
    return make_dict(std::move(entries), work_);
  }

  Result<Value> evaluate_unary(const Expression& node) {
    CLO_ASSIGN(Value operand, evaluate(*node.parts[0]));
    if (node.kind == Kind::kNot) return Value(!truthy(operand));
    if (node.kind == Kind::kNegate) return negate(operand, work_);
    if (const bool* flag = operand.as_bool()) return Value(int64_t{*flag ? 1 : 0});
    if (!is_number(operand))
      return work_.fail("'+' has no meaning before a " + std::string(type_name(operand)));
    return operand;
  }

  Result<Value> evaluate_concat(const Expression& node) {
    std::string joined;
    CLO_ASSIGN(const Values parts, evaluate_parts(node, 0));
    for (const Value& part : parts) {
      CLO_ASSIGN(const std::string text, to_text(part, work_));
      joined += text;
    }
    return Value(std::move(joined));
  }

  Result<Value> evaluate_compare(const Expression& node) {
    CLO_ASSIGN(Value left, evaluate(*node.parts[0]));
    for (size_t i = 0; i < node.operators.size(); ++i) {
      CLO_ASSIGN(Value right, evaluate(*node.parts[i + 1]));
      work_.set_line(node.line);
      CLO_ASSIGN(const bool holds, compare(node.operators[i], left, right, work_));
      if (!holds) return Value(false);
      left = std::move(right);
    }
    return Value(true);
  }

  Result<Value> evaluate_slice(const Expression& node) {
    CLO_ASSIGN(const Value object, evaluate(*node.parts[0]));
    std::optional<int64_t> bounds[3];
    for (size_t i = 0; i < 3; ++i) {
      if (node.parts[i + 1] == nullptr) continue;
      CLO_ASSIGN(const Value bound, evaluate(*node.parts[i + 1]));
      if (const bool* flag = bound.as_bool()) {
        bounds[i] = *flag ? 1 : 0;
      } else if (const int64_t* number = bound.as_int()) {
        // No string or list is longer: the clamp only keeps sums from overflowing.
        bounds[i] = std::clamp<int64_t>(*number, -(int64_t{1} << 60), int64_t{1} << 60);
      } else if (!bound.is_none()) {
        return work_.fail("the bounds of a slice are integers, found a " +
                          std::string(type_name(bound)));
      }
    }
    return slice(object, bounds[0], bounds[1], bounds[2], work_);
  }

  Result<Value> evaluate_builtin(const Expression& node) {
    CLO_ASSIGN(const Value self, evaluate(*node.parts[0]));
    CLO_ASSIGN(Values given, evaluate_parts(node, 1));
    const auto& parameters = node.builtin->parameters;
    Arguments arguments(parameters.size());
    const size_t positional = given.size() - node.keywords.size();
    for (size_t i = 0; i < given.size(); ++i) {
      size_t place = i;
      if (i >= positional) {
        const auto found =
            std::find(parameters.begin(), parameters.end(), node.keywords[i - positional]);
        place = static_cast<size_t>(found - parameters.begin());
      }
      CLO_CHECK(place < arguments.size(), node.name);
      arguments[place] = std::move(given[i]);
    }
    return node.builtin->apply(self, arguments, work_);
  }

  Result<Value> evaluate_call(const Expression& node) {
    const Value callee = look_up(node);
    const Function* function = callee.as_function();
    if (function == nullptr) {
      if (const Undefined* undefined = callee.as_undefined()) return work_.fail(*undefined->what);
      return work_.fail("a " + std::string(type_name(callee)) + " cannot be called");
    }
    CLO_ASSIGN(Values given, evaluate_parts(node, 0));
    if (function->macro != nullptr) return call_macro(*function->macro, node, std::move(given));
    return call_function(function->name, std::move(given), node.keywords, now_, work_);
  }

  // A macro sees its parameters and the variables of the top level, not those of its caller.
  Result<Value> call_macro(const Statement& macro, const Expression& call, Values given) {
    const size_t positional = given.size() - call.keywords.size();
    if (positional > macro.targets.size())
      return work_.fail("the macro \"" + macro.text + "\" takes " +
                        std::to_string(macro.targets.size()) + " arguments, not " +
                        std::to_string(positional));
    Frame parameters;
    for (size_t i = 0; i < given.size(); ++i) {
      const std::string& name =
          i < positional ? macro.targets[i].name : call.keywords[i - positional];
      const bool known = std::any_of(macro.targets.begin(), macro.targets.end(),
                                     [&](const auto& target) { return target.name == name; });
      if (!known || !parameters.emplace(name, std::move(given[i])).second)
        return work_.fail("the macro \"" + macro.text + "\" cannot take the argument \"" + name +
                          "\"");
    }
    // The frames of the caller are set aside; only the top level stays.
    std::vector<Frame> callers;
    std::move(frames_.begin() + 1, frames_.end(), std::back_inserter(callers));
    frames_.resize(1);
    frames_.push_back(std::move(parameters));
    Result<std::string> text = run_macro(macro);
    frames_.resize(1);
    std::move(callers.begin(), callers.end(), std::back_inserter(frames_));
    if (!text) return std::move(text).error();
    return Value(std::move(text).value());
  }

  Result<std::string> run_macro(const Statement& macro) {
    for (size_t i = 0; i < macro.targets.size(); ++i) {
      const std::string& name = macro.targets[i].name;
      if (frames_.back().contains(name)) continue;
      Value otherwise = Value::undefined("parameter '" + name + "' was not provided");
      if (macro.expressions[i] != nullptr) {
        CLO_ASSIGN(otherwise, evaluate(*macro.expressions[i]));
      }
      frames_.back().emplace(name, std::move(otherwise));
    }
    std::string text;
    CLO_TRY(capture(macro.bodies[0], text));
    return text;
  }

  std::vector<Frame> frames_;
  std::tm now_;
  Work& work_;
  std::string out_;
  int depth_ = 0;
};

}  // namespace

Result<std::string> run_template(const Body& body, Inputs inputs, Work& work) {
  return Evaluator(std::move(inputs), work).render(body);
}

}  // namespace clo::jinja
