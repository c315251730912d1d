#pragma once
// A run of a suite as one page for a browser: styles and charts are inside it.
#include <string>
#include <utility>
#include <vector>

#include "eval/suite_figures.h"
#include "eval/suite_summary.h"

namespace clo {

struct HtmlInput {
  std::string suite, model;
  std::vector<std::pair<std::string, std::string>> facts;  // commit, command, ...
  std::vector<std::string> policies;                       // dense first
  const std::vector<ItemRecord>* records = nullptr;
  const std::vector<SummaryRow>* rows = nullptr;
  const std::vector<SuiteFigure>* figures = nullptr;
};
std::string html_report(const HtmlInput& input);

}  // namespace clo
