#pragma once
// Python's operators on template values. Arithmetic on integers that would leave 64 bits is an
// Error. Pure functions but for the Work they spend.
#include <optional>
#include <string_view>

#include "clo/result.h"
#include "text/jinja/ast.h"
#include "text/jinja/value.h"

namespace clo::jinja {

// Fails: kBadRequest for types that the operator does not take, division by zero, overflow.
Result<Value> binary(Operator op, const Value& left, const Value& right, Work& work);
Result<Value> negate(const Value& value, Work& work);
Result<bool> compare(Operator op, const Value& left, const Value& right, Work& work);

// object[key] and object.name; what is not there is Undefined. Fails: kBadRequest on Undefined.
Result<Value> get_item(const Value& object, const Value& key, Work& work);
Result<Value> get_attribute(const Value& object, std::string_view name, Work& work);
// The item at a path such as "function.name", as Jinja's attribute= arguments mean it.
Result<Value> get_path(const Value& object, std::string_view path, Work& work);

// object[begin:end:step] of a string, list or tuple.
Result<Value> slice(const Value& object, std::optional<int64_t> begin, std::optional<int64_t> end,
                    std::optional<int64_t> step, Work& work);

// Python's len(); Undefined counts as empty.
Result<int64_t> length(const Value& value, Work& work);

}  // namespace clo::jinja
