#include "base/try.h"
#include "text/jinja/builtins.h"
#include "text/jinja/operators.h"

namespace clo::jinja {

namespace {

using Predicate = bool (*)(const Value&);

template <Predicate holds>
Result<Value> type_test(const Value& self, const Arguments&, Work&) {
  return Value(holds(self));
}

template <Operator op>
Result<Value> comparison(const Value& self, const Arguments& arguments, Work& work) {
  CLO_ASSIGN(const bool holds, compare(op, self, *arguments[0], work));
  return Value(holds);
}

// value % divisor == remainder.
Result<Value> divides(const Value& self, const Value& divisor, int64_t remainder, Work& work) {
  CLO_ASSIGN(const Value rest, binary(Operator::kModulo, self, divisor, work));
  CLO_ASSIGN(const bool holds, equal(rest, Value(remainder), work));
  return Value(holds);
}
Result<Value> test_even(const Value& self, const Arguments&, Work& work) {
  return divides(self, Value(int64_t{2}), 0, work);
}
Result<Value> test_odd(const Value& self, const Arguments&, Work& work) {
  return divides(self, Value(int64_t{2}), 1, work);
}
Result<Value> test_divisibleby(const Value& self, const Arguments& arguments, Work& work) {
  return divides(self, *arguments[0], 0, work);
}

// Python's `is`, for the values of which there is only one.
Result<Value> test_sameas(const Value& self, const Arguments& arguments, Work& work) {
  const Value& other = *arguments[0];
  if (!other.is_none() && other.as_bool() == nullptr)
    return work.unsupported("sameas with anything but true, false and none");
  if (other.is_none()) return Value(self.is_none());
  return Value(self.as_bool() != nullptr && *self.as_bool() == *other.as_bool());
}

bool is_string(const Value& v) { return v.as_text() != nullptr; }
bool is_mapping(const Value& v) { return v.as_dict() != nullptr; }
bool is_boolean(const Value& v) { return v.as_bool() != nullptr; }
bool is_integer(const Value& v) { return v.as_int() != nullptr; }
bool is_float(const Value& v) { return v.as_float() != nullptr; }
bool is_true(const Value& v) { return is_boolean(v) && *v.as_bool(); }
bool is_false(const Value& v) { return is_boolean(v) && !*v.as_bool(); }
bool is_none(const Value& v) { return v.is_none(); }
bool is_undefined(const Value& v) { return v.is_undefined(); }
bool is_defined(const Value& v) { return !v.is_undefined(); }
bool is_callable(const Value& v) { return v.as_function() != nullptr || v.is_undefined(); }
// Python asks for len() and items, which Undefined has too.
bool is_sequence(const Value& v) {
  return is_string(v) || is_mapping(v) || v.as_list() != nullptr || v.is_undefined();
}
bool is_iterable(const Value& v) { return is_sequence(v) || v.as_loop() != nullptr; }

const std::vector<Builtin>& tests() {
  static const std::vector<Builtin> kTests = {
      {"!=", {"other"}, 1, comparison<Operator::kNotEqual>},
      {"<", {"other"}, 1, comparison<Operator::kLess>},
      {"<=", {"other"}, 1, comparison<Operator::kLessEqual>},
      {"==", {"other"}, 1, comparison<Operator::kEqual>},
      {">", {"other"}, 1, comparison<Operator::kGreater>},
      {">=", {"other"}, 1, comparison<Operator::kGreaterEqual>},
      {"boolean", {}, 0, type_test<is_boolean>},
      {"callable", {}, 0, type_test<is_callable>},
      {"defined", {}, 0, type_test<is_defined>},
      {"divisibleby", {"num"}, 1, test_divisibleby},
      {"eq", {"other"}, 1, comparison<Operator::kEqual>},
      {"equalto", {"other"}, 1, comparison<Operator::kEqual>},
      {"even", {}, 0, test_even},
      {"false", {}, 0, type_test<is_false>},
      {"float", {}, 0, type_test<is_float>},
      {"ge", {"other"}, 1, comparison<Operator::kGreaterEqual>},
      {"greaterthan", {"other"}, 1, comparison<Operator::kGreater>},
      {"gt", {"other"}, 1, comparison<Operator::kGreater>},
      {"in", {"seq"}, 1, comparison<Operator::kIn>},
      {"integer", {}, 0, type_test<is_integer>},
      {"iterable", {}, 0, type_test<is_iterable>},
      {"le", {"other"}, 1, comparison<Operator::kLessEqual>},
      {"lessthan", {"other"}, 1, comparison<Operator::kLess>},
      {"lt", {"other"}, 1, comparison<Operator::kLess>},
      {"mapping", {}, 0, type_test<is_mapping>},
      {"ne", {"other"}, 1, comparison<Operator::kNotEqual>},
      {"none", {}, 0, type_test<is_none>},
      {"number", {}, 0, type_test<is_number>},
      {"odd", {}, 0, test_odd},
      {"sameas", {"other"}, 1, test_sameas},
      {"sequence", {}, 0, type_test<is_sequence>},
      {"string", {}, 0, type_test<is_string>},
      {"true", {}, 0, type_test<is_true>},
      {"undefined", {}, 0, type_test<is_undefined>},
  };
  return kTests;
}

}  // namespace

const Builtin* find_test(std::string_view name) {
  for (const Builtin& test : tests())
    if (test.name == name) return &test;
  return nullptr;
}

}  // namespace clo::jinja
