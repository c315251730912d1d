#pragma once
// Runs a parsed template. One call, one result: nothing of a rendering outlives it, and the tree
// and the variables are only read, so renderings of one template may run on several threads.
#include <ctime>
#include <map>
#include <string>

#include "clo/result.h"
#include "text/jinja/ast.h"
#include "text/jinja/work.h"

namespace clo::jinja {

struct Inputs {
  std::map<std::string, Value> variables;
  std::tm now{};  // what strftime_now() formats
};

// The text of the template. Fails: kBadRequest when the template raises an exception or uses values
// against their types, kUnsupported for what is only known when it happens (such as printing a
// function), each with the line.
Result<std::string> run_template(const Body& body, Inputs inputs, Work& work);

}  // namespace clo::jinja
