// One needle in prose at each depth of a grid.
#include <algorithm>

#include "eval/prose.h"
#include "eval/suites.h"

namespace clo {

Result<EvalItem> make_niah(const SuiteRequest& request) {
  const double depth = sweep(request.index % request.depths, request.depths);
  return request.fit([&](int64_t sentences) {
    EvalItem item = request.start();
    ItemRandom random(item.seed);
    const std::string key = word_pair(random), value = digits(random, 7);
    const std::string needle = "The special magic number for " + key + " is: " + value + ".";
    std::vector<Piece> pieces;
    size_t bytes = 0;
    for (int64_t i = 0; i < sentences; ++i) {
      pieces.push_back({prose_sentence(random), false});
      bytes += pieces.back().text.size() + 1;
    }
    // At the depth's place, or after the last sentence that ends before it.
    const double place = depth * static_cast<double>(bytes);
    size_t before = 0, at = 0;
    while (at < pieces.size() &&
           static_cast<double>(before + pieces[at].text.size() + 1) <= place) {
      before += pieces[at++].text.size() + 1;
    }
    if (depth >= 1) at = pieces.size();  // whatever the sum rounds to
    pieces.insert(pieces.begin() + static_cast<std::ptrdiff_t>(at), {needle, true});
    item.text = "Answer from the following text alone.\n";
    append_pieces(item, pieces, " ");
    item.text += "\nWhat is the special magic number for " + key + "?";
    item.answers = {value};
    item.max_new_tokens = 32;
    item.numbers["depth"] = depth;
    return item;
  });
}

}  // namespace clo
