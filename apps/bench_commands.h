#pragma once
// The subcommands of `clo bench`, one file for what a model does, one for what a
// GPU does and one for hash training.
#include <CLI/App.hpp>
#include <vector>

#include "commands.h"

namespace clo::app {

struct BenchCommand {
  CLI::App* sub = nullptr;
  Command run;
};

void add_train_bench(CLI::App& app, std::vector<BenchCommand>& commands);
void add_gpu_benches(CLI::App& app, std::vector<BenchCommand>& commands);

}  // namespace clo::app
