#pragma once
// A profile as people see it: tables, the plan, and heat maps.
#include <CLI/App.hpp>
#include <optional>
#include <string>

#include "clo/engine.h"
#include "io/model_config.h"
#include "profile/plan.h"

namespace clo::app {

// One line a layer, means over its heads; `per_head`: one line a KV head.
void print_statistics(const Profile& profile, const KvShape& shape, bool per_head);

// Flags of the plan, as clo profile and clo inspect take them.
struct PlanFlags {
  std::optional<std::string> budget;
  std::string link = "25GB";
  double loss = 0.05, step_ms = 10;

  void add_to(CLI::App& app);
  // Prints the plan of one sequence of `context_tokens`. Fails: kBadFlag, and as plan_residence().
  // Without --budget a tenth of the context and no persistent head.
  Status print(const Profile& profile, const KvShape& shape, const PolicyOptions& policy,
               int64_t context_tokens) const;
};

// Writes PREFIX-FIGURE.svg and .png, layer by head, for each figure the profile has.
// Fails: kBadFile.
Status write_heat_maps(const Profile& profile, const KvShape& shape, const std::string& prefix);

}  // namespace clo::app
