#pragma once
// Several policies for one table: every combination of the lists that were given, over the flags of
// a single policy.
#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "eval/named_policy.h"
#include "flags.h"

namespace clo::app {

struct PolicyLists {
  PolicyFlags policy;
  std::string presets, selects, ratios, hit_tests, qualities;

  void add_to(CLI::App& app);
  // Fails: kBadFlag for a value that cannot be read, a list beside the flag that it overrides, or a
  // policy named twice.
  Result<std::vector<NamedPolicy>> resolve() const;
};

}  // namespace clo::app
