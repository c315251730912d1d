#pragma once
// The global functions of chat templates: range, namespace, dict, raise_exception, strftime_now.
// Pure but for the Work they spend.
#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"
#include "text/jinja/value.h"

namespace clo::jinja {

// Calls a global function. The last of `arguments` belong to `keywords`; strftime_now formats
// `now`. Fails: kBadRequest with the text of raise_exception, or for arguments it does not take.
Result<Value> call_function(std::string_view name, Values arguments,
                            const std::vector<std::string>& keywords, const std::tm& now,
                            Work& work);

// namespace.name = value. Fails: kUnsupported for a namespace or loop as the value.
Status set_namespace_entry(Namespace& space, const std::string& name, const Value& value,
                           Work& work);

}  // namespace clo::jinja
