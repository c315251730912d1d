// Does length alone hurt? The same sums with their evidence at the start or right before the
// question, beside filler of two kinds, filler that no token may attend to, or none.
#include <set>

#include "eval/prose.h"
#include "eval/suites.h"

namespace clo {

namespace {

constexpr int kVariables = 12;
constexpr size_t kSummed = 4;

struct Sum {
  std::vector<std::string> names, lines;
  std::vector<size_t> summed;  // indices, ascending
  int total = 0;
};

Sum draw_sum(ItemRandom& random) {
  Sum sum;
  std::set<std::string> taken;
  std::vector<int> values;
  while (std::ssize(sum.names) < kVariables) {
    std::string name = letters(random, 5, 'A');
    if (!taken.insert(name).second) continue;
    values.push_back(1 + static_cast<int>(random.below(99)));
    sum.lines.push_back("The value of " + name + " is " + std::to_string(values.back()) + ".");
    sum.names.push_back(std::move(name));
  }
  for (const int64_t chosen : distinct_below(kSummed, kVariables, random)) {
    sum.summed.push_back(static_cast<size_t>(chosen));
    sum.total += values[static_cast<size_t>(chosen)];
  }
  return sum;
}

// What is masked is prose: the same as without a mask, so that the mask is all that differs.
std::string filler(const std::string& task, int64_t units, ItemRandom& random) {
  std::string text;
  for (int64_t i = 0; i < units; ++i) {
    text += task.starts_with("whitespace") ? " \n"
                                           : prose_sentence(random) + (i + 1 < units ? " " : "");
  }
  return text;
}

}  // namespace

Result<EvalItem> make_length(const SuiteRequest& request) {
  const ItemMaker make = [&](int64_t units) {
    EvalItem item = request.start();
    // The sum is the same at every length and with every filler: only they differ.
    item.seed = item_seed(request.suite, "varsum", 0, request.index, request.seed);
    ItemRandom random(item.seed);
    const Sum sum = draw_sum(random);
    const std::string stuffing = filler(request.task, units, random);
    std::string evidence;
    std::vector<TextSpan> spans;
    for (size_t i = 0, next = 0; i < sum.lines.size(); ++i) {
      const TextSpan span =
          append_span(evidence, sum.lines[i] + (i + 1 < sum.lines.size() ? " " : ""));
      if (next < sum.summed.size() && sum.summed[next] == i) {
        spans.push_back({span.begin, span.begin + sum.lines[i].size()});
        ++next;
      }
    }
    const bool at_end = request.task.ends_with("_end");
    item.text = "Here are the values of some variables.\n";
    const auto stuff = [&] {
      if (stuffing.empty()) return;
      const TextSpan span = append_span(item.text, stuffing);
      if (request.task.starts_with("masked")) item.masked.push_back(span);
      item.text += "\n";
    };
    if (at_end) stuff();
    const TextSpan place = append_span(item.text, evidence);
    for (const TextSpan& span : spans) {
      item.gold.push_back({place.begin + span.begin, place.begin + span.end});
    }
    item.text += "\n";
    if (!at_end) stuff();
    std::string wanted;
    for (const size_t i : sum.summed) wanted += (wanted.empty() ? "" : " + ") + sum.names[i];
    item.question = "What is " + wanted + "? End your answer with the sum.";
    item.recite = item.text + "Repeat, word for word, the sentences that give the values needed " +
                  "for this question: " + item.question;
    item.text += item.question;
    item.answers = {std::to_string(sum.total)};
    item.metric = Metric::kLastInteger;
    item.max_new_tokens = 128;
    item.labels["filler"] = request.task.substr(0, request.task.find('_'));
    item.labels["evidence"] = request.task == "none" ? "whole" : at_end ? "end" : "start";
    item.numbers["filler_units"] = static_cast<double>(units);
    return item;
  };
  if (request.task != "none") return request.fit(make, 1);
  // Without filler nothing is fitted: what the context leaves over stays empty.
  return request.fit(make, 0, 0);
}

}  // namespace clo
