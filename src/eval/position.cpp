// Probing of positions (as VaL): many sentences, functions or records, one of them asked for, its
// place swept over the whole context.
#include <algorithm>
#include <set>

#include "eval/prose.h"
#include "eval/suites.h"
#include "eval/text_pieces.h"
#include "eval/words.h"

namespace clo {

namespace {

constexpr int64_t kSets = 4;        // independent contexts, where there are items for them
constexpr int64_t kPieceWords = 8;  // of a sentence, in a question

struct Entry {
  std::string text;
  std::string probe;                 // what the question gives
  std::vector<std::string> answers;  // what it asks for
};

Entry sentence_entry(ItemRandom& random) {
  Entry entry;
  entry.text = even_sentence(random);
  const std::vector<std::string> words = split_words(entry.text);
  // A piece that touches neither end.
  const auto first = 1 + random.below(words.size() - kPieceWords - 1);
  for (size_t i = first; i < first + kPieceWords; ++i) {
    entry.probe += (i > first ? " " : "") + words[i];
  }
  entry.answers = {entry.text};
  return entry;
}

Entry function_entry(ItemRandom& random) {
  const auto variable = [&] {
    return std::string(pick(nouns(), random)) + "_" + std::to_string(random.below(1000));
  };
  Entry entry;
  const std::string name = std::string(pick(verbs(), random)) + "_" +
                           std::string(pick(adjectives(), random)) + "_" +
                           std::string(pick(nouns(), random));
  const std::string input = variable(), middle = variable(), output = variable();
  const std::string lines[] = {
      middle + " = " + input + " * " + std::to_string(2 + random.below(97)),
      output + " = " + middle + " + len(\"" + std::string(pick(adjectives(), random)) + "\")",
      "return " + output + " - " + std::to_string(1 + random.below(999))};
  entry.text = "def " + name + "(" + input + "):";
  for (const std::string& line : lines) entry.text += "\n    " + line;
  entry.probe = lines[random.below(3)];
  entry.answers = {name};
  return entry;
}

Entry record_entry(ItemRandom& random) {
  Entry entry;
  const std::string id = "Q" + digits(random, 6 + static_cast<int>(random.below(3)));
  const std::string label =
      std::string(pick(adjectives(), random)) + " " + std::string(pick(nouns(), random));
  const std::string description =
      std::string(pick(nouns(), random)) + " that " + std::string(pick(verbs(), random)) + " the " +
      std::string(pick(adjectives(), random)) + " " + std::string(pick(nouns(), random));
  entry.text = id + " | " + label + " | " + description;
  entry.probe = id;
  entry.answers = {label, description};
  return entry;
}

Entry draw_entry(const std::string& task, ItemRandom& random) {
  if (task == "document") return sentence_entry(random);
  return task == "code" ? function_entry(random) : record_entry(random);
}

}  // namespace

Result<EvalItem> make_position(const SuiteRequest& request) {
  // Items of a set share one context: set s has items [s * items / sets, (s + 1) * items / sets).
  const int64_t sets = std::min(kSets, request.items);
  const int64_t set = request.index * sets / request.items;
  const int64_t first = (set * request.items + sets - 1) / sets;
  const int64_t end = ((set + 1) * request.items + sets - 1) / sets;
  const uint64_t set_seed =
      item_seed(request.suite, request.task, request.context, set, request.seed);
  return request.fit(
      [&](int64_t entries) {
        EvalItem item = request.start();
        item.seed = set_seed;
        item.shared_prefix =
            request.task + "/" + std::to_string(item.context) + "/" + std::to_string(set);
        ItemRandom random(set_seed);
        std::vector<Entry> all;
        std::set<std::string> probes;
        // A question that fits two entries would have no one answer: probes differ.
        while (std::ssize(all) < entries) {
          Entry entry = draw_entry(request.task, random);
          if (probes.insert(entry.probe).second) all.push_back(std::move(entry));
        }
        const auto wanted =
            static_cast<size_t>((2 * (request.index - first) + 1) * entries / (2 * (end - first)));
        std::vector<Piece> pieces;
        for (size_t i = 0; i < all.size(); ++i) pieces.push_back({all[i].text, i == wanted});
        const Entry& entry = all[wanted];
        const int64_t bins = request.task == "database" ? 15 : 16;
        if (request.task == "document") {
          item.text = "Here are many sentences.\n";
          append_pieces(item, pieces, " ");
          item.text +=
              "\nQuote the whole sentence that has this piece in it: \"" + entry.probe + "\"";
          item.answer_prefix = "The sentence is:";
          item.metric = Metric::kWordRecall;
        } else if (request.task == "code") {
          item.text = "Here are many functions.\n";
          append_pieces(item, pieces, "\n\n");
          item.text += "\n\nWhich function has this line in it? " + entry.probe;
          item.answer_prefix = "The name of the function is:";
          item.metric = Metric::kSubstring;
        } else {
          item.text = "Here are many records, each with an id, a label and a description.\n";
          append_pieces(item, pieces, "\n");
          item.text += "\nWhat are the label and the description of " + entry.probe + "?";
          item.answer_prefix = entry.probe + " |";
          item.metric = Metric::kRecordFields;
        }
        item.answers = entry.answers;
        item.max_new_tokens = 128;
        item.numbers["entries"] = static_cast<double>(entries);
        item.numbers["entry"] = static_cast<double>(wanted);
        item.numbers["depth"] = sweep(static_cast<int64_t>(wanted), entries);
        item.numbers["bin"] = static_cast<double>(static_cast<int64_t>(wanted) * bins / entries);
        item.numbers["bins"] = static_cast<double>(bins);
        item.numbers["set"] = static_cast<double>(set);
        return item;
      },
      1);
}

}  // namespace clo
