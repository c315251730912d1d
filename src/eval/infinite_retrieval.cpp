// InfiniteBench's synthetic retrieval: the value of a key in one JSON line, a pass key and a long
// number in noise.
#include <algorithm>
#include <set>

#include "eval/prose.h"
#include "eval/suites.h"

namespace clo {

namespace {

EvalItem kv_retrieval(const SuiteRequest& request, int64_t pairs) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  // The depth sweeps over the items: item i asks for pair i * pairs / items.
  const int64_t wanted = std::min(pairs - 1, request.index % request.items * pairs / request.items);
  std::vector<Piece> pieces;
  std::string key, value;
  for (int64_t p = 0; p < pairs; ++p) {
    const std::string k = uuid4(random), v = uuid4(random);
    if (p == wanted) {
      key = k;
      value = v;
    }
    pieces.push_back({"\"" + k + "\": \"" + v + "\"", p == wanted});
  }
  item.text = "The JSON object below maps keys to values.\n{";
  append_pieces(item, pieces, ", ");
  item.text += "}\nWhich value belongs to the key \"" + key + "\"?";
  item.answer_prefix = "The value is:";
  item.answers = {value};
  item.metric = Metric::kKvWord;
  item.max_new_tokens = 50;
  item.numbers["depth"] = sweep(wanted, pairs);
  return item;
}

// A sentence that states a number twice, at a depth that sweeps over the items.
EvalItem stated_twice(const SuiteRequest& request, int64_t lines) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  const bool is_key = request.task == "passkey";
  std::string number = digits(random, 5);
  if (!is_key) {
    std::string doubled;
    for (const char digit : number) doubled += std::string(2, digit);
    number = doubled;
  }
  const std::string name = is_key ? "pass key" : "sequence of digits";
  const double depth = sweep(request.index % request.items, request.items);
  const auto at = static_cast<int64_t>(depth * static_cast<double>(lines));
  std::vector<Piece> pieces;
  for (int64_t i = 0; i <= lines; ++i) {
    if (i == at) {
      pieces.push_back({"The " + name + " is " + number + ". Do not forget it. " + number +
                            " is the " + name + ".",
                        true});
    }
    if (i < lines) pieces.push_back({std::string(noise_line()), false});
  }
  item.text =
      "One important thing is hidden in a lot of unimportant text. Find it and remember "
      "it.\n";
  append_pieces(item, pieces, "\n");
  item.text += "\nWhat is the " + name + "?";
  item.answer_prefix = "The " + name + " is";
  item.answers = {number};
  item.metric = Metric::kFirstNumber;
  item.max_new_tokens = is_key ? 6 : 12;
  item.numbers["depth"] = depth;
  return item;
}

}  // namespace

Result<EvalItem> make_infinite_retrieval(const SuiteRequest& request) {
  if (request.task == "kv_retrieval") {
    return request.fit([&](int64_t units) { return kv_retrieval(request, units); }, 1);
  }
  return request.fit([&](int64_t units) { return stated_twice(request, units); });
}

}  // namespace clo
