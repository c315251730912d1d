#pragma once
// The subcommands of `clo eval` that have files of their own.
#include "commands.h"

namespace clo::app {

// Adds "fidelity". The result runs it once it has been parsed.
Command add_eval_fidelity(CLI::App& app);

}  // namespace clo::app
