#pragma once
// The subcommands of `clo`. Each adds its flags to its own CLI11 command and returns what runs it;
// that returns an exit status, or an Error that main() prints.
#include <CLI/App.hpp>
#include <functional>

#include "clo/result.h"

namespace clo::app {

using Command = std::function<Result<int>()>;

Command add_demo(CLI::App& app);
Command add_run(CLI::App& app);
Command add_inspect(CLI::App& app);
Command add_profile(CLI::App& app);
Command add_eval(CLI::App& app);
Command add_bench(CLI::App& app);

}  // namespace clo::app
