#pragma once
// LongBench's own data, as its JSON-lines files give it: prompts in our wording, the published
// metrics and answer lengths, long inputs cut in the middle.
#include <string>
#include <vector>

#include "eval/suites.h"

namespace clo {

// A suite of the items in these texts, one task for each data set, in the order they come.
// Fails: kBadFile for a line that is not a JSON object, a field that is missing or of another type,
// a data set that is not known (with the line), and a text without items.
struct LongBenchText {
  std::string where;  // names it in errors
  std::string lines;
};
Result<Suite> parse_longbench(const std::vector<LongBenchText>& texts);
// The same from files. Fails: kBadFile as well for one that cannot be read.
Result<Suite> load_longbench(const std::vector<std::string>& paths);

}  // namespace clo
