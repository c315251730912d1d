#include "policy_lists.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "base/try.h"
#include "text_files.h"

namespace clo::app {

namespace {

// A list and the flag that it would override. Fails: kBadFlag when both were given.
Status check_list(const std::string& list, const char* list_flag, bool given, const char* flag) {
  if (list.empty() || !given) return Ok{};
  return Error{ErrorCode::kBadFlag, "contradict each other: the list says which to run; drop one",
               std::string(list_flag) + " and " + flag};
}

}  // namespace

void PolicyLists::add_to(CLI::App& app) {
  app.add_option("--presets", presets,
                 "Several presets, such as default,hata (as --preset takes them here)");
  app.add_option("--selects", selects, "Several selections, such as exact,hash,random");
  app.add_option("--ratios", ratios, "Several set sizes, such as 0.1,0.05,0.02");
  policy.add_to(app);
}

Result<std::vector<NamedPolicy>> PolicyLists::resolve() const {
  CLO_TRY(check_list(presets, "--presets", policy.preset.has_value(), "--preset"));
  CLO_TRY(check_list(selects, "--selects", policy.select.has_value(), "--select"));
  CLO_TRY(check_list(ratios, "--ratios", policy.kv_ratio.has_value(), "--kv-ratio"));
  CLO_TRY(check_list(ratios, "--ratios", policy.set_tokens.has_value(), "--set-tokens"));
  std::vector<NamedPolicy> policies;
  const auto list_or = [](const std::string& text, std::string fallback) {
    return text.empty() ? std::vector<std::string>{std::move(fallback)} : split_list(text);
  };
  // --preset takes a list as well: one habit for one preset and for several.
  for (const std::string& preset_name :
       split_list(presets.empty() ? policy.preset.value_or("default") : presets)) {
    for (const std::string& select : list_or(selects, "")) {
      for (const std::string& ratio : list_or(ratios, "")) {
        PolicyFlags one = policy;
        std::string name = preset_name;
        if (!select.empty()) {
          one.select = select;
          name += " " + select;
        }
        if (!ratio.empty()) {
          char* end = nullptr;
          one.kv_ratio = std::strtod(ratio.c_str(), &end);
          if (end == ratio.c_str() || *end != '\0') {
            return Error{ErrorCode::kBadFlag, "expected numbers, found \"" + ratio + "\"",
                         "--ratios"};
          }
          name += " " + ratio;
        }
        CLO_ASSIGN(PolicyOptions options, one.resolve(preset_name));
        for (const NamedPolicy& other : policies) {
          if (other.name == name) {
            return Error{ErrorCode::kBadFlag, "\"" + name + "\" is named twice",
                         "--presets, --selects, --ratios"};
          }
        }
        policies.push_back({name, options});
      }
    }
  }
  return policies;
}

}  // namespace clo::app
