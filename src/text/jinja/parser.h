#pragma once
// Parses a template into its tree. Everything outside the supported subset of Jinja is refused
// here, by name and line, even in branches that no chat takes: a template either works or does not
// load.
#include <string>
#include <string_view>

#include "clo/result.h"
#include "text/jinja/ast.h"

namespace clo::jinja {

// Names that the evaluator defines as functions.
bool is_global_function(std::string_view name);

// Fails: kBadFile for malformed templates, kUnsupported for constructs outside the subset.
Result<Body> parse_template(std::string_view source, const std::string& where);

}  // namespace clo::jinja
