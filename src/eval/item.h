#pragma once
// One item of an evaluation suite: what is asked, what counts as right, and where in the prompt
// the evidence stands. Made by a suite, deterministic by (suite, task, context, index, seed).
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace clo {

// How an answer becomes a score in [0, 1]; eval/scorers.h defines each.
enum class Metric : uint8_t {
  kMatchAll,        // share of the references that occur
  kMatchPart,       // whether any occurs
  kF1,              // words in common
  kF1Chinese,       // characters in common
  kRougeL,          // longest common subsequence of words
  kRougeLChinese,   // ... of characters
  kClass,           // the class named, and no other
  kIntegerShare,    // share of the integers named that are the reference's
  kEditSimilarity,  // of the first line of code
  kSubspan,         // whether any normalised reference occurs
  kFirstNumber,
  kLastInteger,
  kLastWordInteger,
  kKvWord,        // whether the value is a word of the answer
  kPrefixShare,   // of the running values, those right before the first wrong one
  kWordRecall,    // share of the reference's words that occur
  kSubstring,     // whether any reference occurs as it is written
  kRecordFields,  // whether any reference occurs, dots left out, in any case
};
std::string_view metric_name(Metric metric);

// Bytes [begin, end) of a text.
struct TextSpan {
  size_t begin = 0;
  size_t end = 0;
};

struct EvalItem {
  std::string suite;
  std::string task;
  int64_t context = 0;  // prompt (with chat template) and answer fit in these tokens
  int64_t index = 0;    // of the task's items at this context
  uint64_t seed = 0;

  std::string text;            // the user's turn: it neither begins nor ends with white space
  std::string answer_prefix;   // the answer goes on from it; "": none
  bool raw = false;            // without the chat template, whatever the model has
  std::vector<TextSpan> gold;  // the evidence in `text`, ascending and disjoint
  // Parts of `text` that no token outside may attend to, likewise; apart from `gold`.
  std::vector<TextSpan> masked;
  // Items with equal keys share the start of their prompts, so stored prefixes are kept between
  // them; empty: nothing is shared.
  std::string shared_prefix;

  std::vector<std::string> answers;  // references
  std::vector<std::string> classes;  // of kClass: all there are
  Metric metric = Metric::kMatchAll;
  bool first_line = false;  // only the first line of an answer counts
  std::vector<std::string> stop;
  int64_t max_new_tokens = 128;

  // For retrieve-then-solve; empty where the suite has no such form. `recite` is the user's turn
  // that asks for the evidence, with that and the masked parts where `text` has them; `question`
  // stands alone.
  std::string recite;
  std::string question;

  // What tables and plots group by: depth, hops, filler, ...
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> labels;

  // "ruler/vt/4096/7": names the item on the command line.
  std::string id() const;
};

// The seed of an item, from its place in its suite and the run's seed.
uint64_t item_seed(std::string_view suite, std::string_view task, int64_t context, int64_t index,
                   uint64_t run_seed);

// Appends `piece` to `text` and returns where it stands.
TextSpan append_span(std::string& text, std::string_view piece);

}  // namespace clo
