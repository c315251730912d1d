#pragma once
// The filters, tests and methods that templates may use, each with the parameters it takes. The
// parser looks them up, so that an unknown one is refused before anything is rendered. The tables
// are constant; functions are pure but for the Work they spend.
#include <optional>
#include <string_view>
#include <vector>

#include "clo/result.h"
#include "text/jinja/value.h"

namespace clo::jinja {

// One entry a parameter, in the order of the table; absent where the template gave none.
using Arguments = std::vector<std::optional<Value>>;

struct Builtin {
  std::string_view name;
  std::vector<std::string_view> parameters;
  size_t required = 0;  // so many of the parameters must be given
  Result<Value> (*apply)(const Value& self, const Arguments& arguments, Work& work) = nullptr;
};

// nullptr for what is not known.
const Builtin* find_filter(std::string_view name);
const Builtin* find_test(std::string_view name);
const Builtin* find_method(std::string_view name);

}  // namespace clo::jinja
