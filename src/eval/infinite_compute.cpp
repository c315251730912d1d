// InfiniteBench's synthetic computing: extremes of a list, a long sum step by step, nested calls.
#include <algorithm>

#include "eval/prose.h"
#include "eval/suites.h"

namespace clo {

namespace {

EvalItem math_find(const SuiteRequest& request, int64_t count) {
  struct Wanted {
    std::string_view name;
    int64_t from_low, from_high;  // the place in sorted order from one of the ends; -1: not
  };
  static constexpr Wanted kWanted[] = {{"largest number", -1, 0},
                                       {"second largest number", -1, 1},
                                       {"third largest number", -1, 2},
                                       {"smallest number", 0, -1},
                                       {"second smallest number", 1, -1},
                                       {"third smallest number", 2, -1},
                                       {"median", -1, -1}};
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  // The ends vary, so that the extremes are not always the same.
  const uint64_t low = random.below(10), high = 90 + random.below(10);
  std::vector<int64_t> numbers;
  std::string list;
  for (int64_t i = 0; i < count; ++i) {
    numbers.push_back(static_cast<int64_t>(low + random.below(high - low + 1)));
    list += (i > 0 ? ", " : "") + std::to_string(numbers.back());
  }
  std::sort(numbers.begin(), numbers.end());
  const Wanted& wanted = kWanted[static_cast<size_t>(request.index) % std::size(kWanted)];
  const int64_t place = wanted.from_low >= 0    ? wanted.from_low
                        : wanted.from_high >= 0 ? count - 1 - wanted.from_high
                                                : count / 2;
  item.text = "Look at this list of numbers.\n[" + list + "]\nWhat is the " +
              std::string(wanted.name) + " in the list? Equal numbers count as often as they come.";
  item.answer_prefix = "The " + std::string(wanted.name) + " is";
  item.answers = {std::to_string(numbers[static_cast<size_t>(place)])};
  item.metric = Metric::kFirstNumber;
  item.max_new_tokens = 3;
  item.labels["wanted"] = wanted.name;
  return item;
}

// Tokens that one running value and its comma may take in the answer.
constexpr int64_t kTokensPerValue = 4;

EvalItem math_calc(const SuiteRequest& request, int64_t terms) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  int64_t value = static_cast<int64_t>(random.below(100));
  std::string expression = std::to_string(value), values;
  for (int64_t t = 0; t < terms; ++t) {
    // Either sign, but the running value stays in 0 to 99.
    const auto next = static_cast<int64_t>(random.below(100));
    expression += next >= value ? " + " : " - ";
    expression += std::to_string(std::abs(next - value));
    value = next;
    values += (t > 0 ? ", " : "") + std::to_string(value);
  }
  item.text =
      "Compute this expression from left to right and write down the value after every "
      "step, separated by commas, and nothing else. (1 + 2 - 3 gives 3, 0.)\n" +
      expression;
  item.answers = {values};
  item.metric = Metric::kPrefixShare;
  item.max_new_tokens = kTokensPerValue * terms;
  return item;
}

EvalItem code_run(const SuiteRequest& request, int64_t functions) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  const int64_t levels = 2 + 2 * (request.index % 5);
  // Function f stands on level f mod levels; the first of each level make up the chain.
  std::vector<std::string> names;
  std::vector<int64_t> added;
  for (const int64_t number : distinct_below(functions, 10 * functions, random)) {
    names.push_back("func_" + std::to_string(number));
    added.push_back(static_cast<int64_t>(random.below(30)) - 12);
  }
  shuffle(names, random);
  const auto argument = static_cast<int64_t>(random.below(21)) - 10;
  int64_t result = argument;
  std::vector<Piece> pieces;
  for (int64_t f = 0; f < functions; ++f) {
    const auto at = static_cast<size_t>(f);
    const bool in_chain = f < levels;
    std::string callee = "x";
    if (f % levels + 1 < levels) {
      // A function of the chain calls the next of the chain, another any of the next level.
      const int64_t level = f % levels + 1;
      const int64_t rows = (functions - 1 - level) / levels + 1;
      const auto row =
          in_chain ? 0 : static_cast<int64_t>(random.below(static_cast<uint64_t>(rows)));
      callee = names[static_cast<size_t>(row * levels + level)] + "(x)";
    }
    const std::string sign = added[at] < 0 ? " - " : " + ";
    pieces.push_back(
        {"def " + names[at] + "(x): return " + callee + sign + std::to_string(std::abs(added[at])),
         in_chain});
    if (in_chain) result += added[at];
  }
  shuffle(pieces, random);
  item.text = "Here are some Python functions.\n";
  append_pieces(item, pieces, "\n");
  const std::string call = names.front() + "(" + std::to_string(argument) + ")";
  item.text += "\nWhat does " + call + " return?";
  item.answer_prefix = "The return value of " + call + " is";
  item.answers = {std::to_string(result)};
  item.metric = Metric::kLastWordInteger;
  item.max_new_tokens = 5;
  item.numbers["levels"] = static_cast<double>(levels);
  return item;
}

}  // namespace

Result<EvalItem> make_infinite_compute(const SuiteRequest& request) {
  if (request.task == "math_find") {
    return request.fit([&](int64_t units) { return math_find(request, units); }, 7);
  }
  if (request.task == "math_calc") {
    return request.fit([&](int64_t units) { return math_calc(request, units); }, 1);
  }
  return request.fit([&](int64_t units) { return code_run(request, units); }, 10, 550);
}

}  // namespace clo
