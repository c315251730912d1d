#pragma once
// The subcommands of `clo eval` that have files of their own.
#include <utility>
#include <vector>

#include "commands.h"

namespace clo::app {

// Adds "fidelity". The result runs it once it has been parsed.
Command add_eval_fidelity(CLI::App& app);
// Adds a subcommand for each suite; each comes with what runs it.
std::vector<std::pair<CLI::App*, Command>> add_eval_suites(CLI::App& app);

}  // namespace clo::app
