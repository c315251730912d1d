#pragma once
// What a suite's run gives at its end: a table for people and summary lines for programs.
#include <string>
#include <vector>

#include "eval/suite_figures.h"
#include "eval/suite_summary.h"

namespace clo::app {

void print_summary(const std::vector<SummaryRow>& rows, const std::vector<SuiteFigure>& figures);
// JSON lines of kind "summary" and "figure".
std::vector<std::string> summary_lines(const std::string& suite,
                                       const std::vector<SummaryRow>& rows,
                                       const std::vector<SuiteFigure>& figures);

}  // namespace clo::app
