// RULER's tasks beside the needles: variable tracking, common words, frequent words.
#include <algorithm>
#include <cmath>
#include <set>

#include "eval/prose.h"
#include "eval/suites.h"
#include "eval/text_pieces.h"
#include "eval/words.h"

namespace clo {

namespace {

constexpr int kHops = 4;
constexpr int64_t kShortContext = 4096;  // below it the word tasks have smaller examples

struct Chain {
  std::string value;
  std::vector<std::string> names, lines;
};

Chain draw_chain(int letters_per_name, std::set<std::string>& taken, ItemRandom& random) {
  Chain chain;
  chain.value = std::to_string(10000 + random.below(89999));
  while (std::ssize(chain.names) < kHops + 1) {
    std::string name = letters(random, letters_per_name, 'A');
    if (!taken.insert(name).second) continue;
    chain.lines.push_back("VAR " + name + " = " +
                          (chain.names.empty() ? chain.value : "VAR " + chain.names.back()));
    chain.names.push_back(std::move(name));
  }
  return chain;
}

std::string chain_question(const Chain& chain) {
  return "Which variables have the value " + chain.value +
         ", given to them directly or through other variables?";
}

std::string chain_answer_start(const Chain& chain) {
  return "The " + std::to_string(chain.names.size()) + " variables with the value " + chain.value +
         " are:";
}

// The chain's lines at sorted places among `noise` lines.
std::vector<Piece> hidden_chain(const Chain& chain, int64_t noise, bool gold, ItemRandom& random) {
  std::vector<int64_t> places;
  for (size_t i = 0; i < chain.lines.size(); ++i) {
    places.push_back(static_cast<int64_t>(random.below(static_cast<uint64_t>(noise) + 1)));
  }
  std::sort(places.begin(), places.end());
  std::vector<Piece> pieces;
  size_t next = 0;
  for (int64_t line = 0; line <= noise; ++line) {
    while (next < places.size() && places[next] == line)
      pieces.push_back({chain.lines[next++], gold});
    if (line < noise) pieces.push_back({std::string(noise_line()), false});
  }
  return pieces;
}

EvalItem variable_tracking(const SuiteRequest& request, int64_t units) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  std::set<std::string> taken;
  const Chain example = draw_chain(3, taken, random);
  const Chain chain = draw_chain(5, taken, random);
  const std::string task = "Follow the assignments of variables that are hidden in the text.\n";
  item.text = task;
  append_pieces(item, hidden_chain(example, 5, false, random), "\n");
  item.text += "\n" + chain_question(example) + "\n" + chain_answer_start(example) + " " +
               joined_with_and(example.names) + "\n\n" + task;
  append_pieces(item, hidden_chain(chain, units, true, random), "\n");
  item.text += "\n" + chain_question(chain);
  item.answer_prefix = chain_answer_start(chain);
  item.answers = chain.names;
  item.max_new_tokens = 30;
  return item;
}

// `count` different words: of the lists, or where they are too few pairs of words.
std::vector<std::string> draw_words(int64_t count, ItemRandom& random) {
  std::set<std::string> all;
  for (const auto& list : {adjectives(), nouns(), verbs()}) all.insert(list.begin(), list.end());
  if (count <= std::ssize(all)) {
    std::vector<std::string> words(all.begin(), all.end());
    shuffle(words, random);
    words.resize(static_cast<size_t>(count));
    return words;
  }
  std::set<std::string> taken;
  std::vector<std::string> words;
  while (std::ssize(words) < count) {
    std::string word = word_pair(random);
    if (taken.insert(word).second) words.push_back(std::move(word));
  }
  return words;
}

// The first ten words `often` times, the others `seldom`, shuffled, numbered, on one line.
std::string numbered_words(const std::vector<std::string>& words, int often, int seldom,
                           ItemRandom& random) {
  std::vector<std::string> list;
  for (size_t w = 0; w < words.size(); ++w) {
    list.insert(list.end(), static_cast<size_t>(w < 10 ? often : seldom), words[w]);
  }
  shuffle(list, random);
  std::string text;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i > 0) text += ' ';
    text += std::to_string(i + 1) + ". " + list[i];
  }
  return text;
}

EvalItem common_words(const SuiteRequest& request, int64_t units) {
  const bool is_short = request.context < kShortContext;
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  const int64_t example_words = is_short ? 20 : 40;
  // One draw for both, so that the example shares no word with the list.
  ItemRandom example_random(random.next());
  std::vector<std::string> words = draw_words(example_words + units, random);
  const std::vector<std::string> example(words.begin(), words.begin() + example_words);
  words.erase(words.begin(), words.begin() + example_words);
  const std::string task =
      "Some words of the numbered list come more often than the others. Keep the ten most common "
      "ones in mind.\n";
  const std::string question = "\nWhich ten words come most often in the list?";
  const std::string start = "The ten most common words are:";
  item.text = task + numbered_words(example, is_short ? 3 : 10, is_short ? 1 : 3, example_random) +
              question + "\n" + start;
  for (size_t i = 0; i < 10; ++i) item.text += " " + std::to_string(i + 1) + ". " + example[i];
  item.text +=
      "\n\n" + task + numbered_words(words, is_short ? 6 : 30, is_short ? 1 : 3, random) + question;
  item.answer_prefix = start;
  item.answers.assign(words.begin(), words.begin() + 10);
  item.max_new_tokens = 120;
  return item;
}

constexpr int64_t kFrequentNewTokens = 50;

// A word of rank r comes W r^-2 / zeta(2) times; rank 1 is written as dots, which do not count.
EvalItem frequent_words(const SuiteRequest& request, int64_t units) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  const int64_t vocabulary = std::max<int64_t>(4, (request.context - kFrequentNewTokens) / 50);
  std::vector<std::string> words;
  std::set<std::string> taken;
  while (std::ssize(words) < vocabulary) {
    std::string word = letters(random, 6, 'a');
    if (taken.insert(word).second) words.push_back(std::move(word));
  }
  constexpr double kZeta2 = 1.6449340668482264;
  const double total =
      static_cast<double>(request.context / 6 + units * std::max<int64_t>(1, request.context / 32));
  std::vector<std::string> list;
  for (size_t r = 1; r <= words.size(); ++r) {
    const auto count = static_cast<size_t>(total / static_cast<double>(r * r) / kZeta2);
    list.insert(list.end(), count, r == 1 ? "..." : words[r - 1]);
  }
  shuffle(list, random);
  item.text =
      "The text is coded in words of six letters. Find the most frequent ones; dots do not "
      "count.\n";
  for (size_t i = 0; i < list.size(); ++i) item.text += (i > 0 ? " " : "") + list[i];
  item.text += "\nWhich three coded words are the most frequent? Leave out the dots.";
  item.answer_prefix = "The three most frequent coded words are:";
  item.answers = {words[1], words[2], words[3]};
  item.max_new_tokens = kFrequentNewTokens;
  return item;
}

}  // namespace

Result<EvalItem> make_ruler_words(const SuiteRequest& request) {
  if (request.task == "vt") {
    return request.fit([&](int64_t units) { return variable_tracking(request, units); });
  }
  if (request.task == "cwe") {
    return request.fit([&](int64_t units) { return common_words(request, units); }, 20);
  }
  return request.fit([&](int64_t units) { return frequent_words(request, units); });
}

}  // namespace clo
