#pragma once
// The figures that a suite is about, beside the means that all have.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eval/paired.h"
#include "eval/suite_run.h"

namespace clo {

// RULER's effective length is the longest with at least this average: what Llama-2-7B has at 4K.
inline constexpr double kRulerThreshold = 85.6;

enum class FigureUnit : uint8_t {
  kDifference,  // points of 100, between two scores
  kPoints,      // points of 100
  kTokens,
  kNumber,
  kNumberDifference,
};
std::string_view unit_name(FigureUnit unit);

struct SuiteFigure {
  std::string task;
  int64_t context = 0;  // 0: of all contexts together
  std::string policy;
  std::string name;  // "separated - adjacent"
  double value = 0;
  std::optional<Interval> interval;
  FigureUnit unit = FigureUnit::kDifference;
  std::string note;  // what must be known to read it; "": nothing
};
// As tables show it: "+1.5", "1.5", "4096", "0.150", "+0.150"; no tokens are "none".
std::string figure_value(const SuiteFigure& figure);
// "+1.5 to +2.0", with as many digits; "-" without one.
std::string figure_interval(const SuiteFigure& figure);

// ruler: effective length, average and weighted averages over the contexts, of the mean over tasks.
// multihop: separated - adjacent, reversed - forward; of set overlap and modes, where measured,
// both and their difference. position: average over bins, largest gap of bins and standard
// deviation over bins, of scores and of the share of the evidence's rows that were attended.
// length: what filler costs dense, the policy, and both. Where evidence was recited: how much of
// it. Empty for other suites.
std::vector<SuiteFigure> suite_figures(const std::string& suite,
                                       const std::vector<ItemRecord>& records,
                                       const std::vector<std::string>& policies);

}  // namespace clo
