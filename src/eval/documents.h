#pragma once
// Long documents with facts planted in them: what recall is tested on. A fact is a line of its
// own, in one of the three forms that the model recall-7m was trained on. Deterministic by seed.
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"
#include "eval/random.h"

namespace clo {

enum class FactForm : uint8_t { kNumber, kWord, kCode };
std::string_view fact_form_name(FactForm form);

struct Fact {
  FactForm form = FactForm::kNumber;
  std::string key;    // two lower-case words joined by a hyphen
  std::string value;  // 7 digits, a word, or 8 hexadecimal digits
  double depth = 0;   // share of the document that comes before it

  std::string statement() const;  // "The special magic number for KEY is: VALUE."
  std::string question() const;   // "What is the special magic number for KEY?"
};

Fact make_fact(FactForm form, ItemRandom& random);

// Whether the first line of `answer` states the value, as a word of its own. (The model card asks
// to score the first line only: a model may run on.)
bool is_right(const Fact& fact, std::string_view answer);

// Lines of text to hide facts in.
class FillerText {
 public:
  // Prose made from a grammar, endless and free of facts.
  static FillerText prose(uint64_t seed);
  // The licence texts of a Debian system, from a random line on, round and round.
  // Fails: kBadFile when the folder holds none.
  static Result<FillerText> licences(uint64_t seed, const std::string& folder);
  // The lines of a text, once; then nothing.
  static FillerText lines_of(std::string text);

  // The next line without its newline; false at the end.
  bool next(std::string& line);

 private:
  enum class Kind : uint8_t { kProse, kLines, kLoop };
  Kind kind_ = Kind::kProse;
  ItemRandom random_{0};
  std::vector<std::string> lines_;
  size_t at_ = 0;
};

inline constexpr const char* kLicenceFolder = "/usr/share/common-licenses";

// Counts the tokens of a text.
using TokenCounter = std::function<Result<int64_t>(std::string_view)>;

// Filler with the facts' statements at their depths, as long as `max_tokens` allows and at most
// one line shorter; no fact in the last `clear_tokens`. Facts whose depths fall on one line follow
// each other. Fails: kBadRequest when the facts alone are too long; whatever `count` fails with.
Result<std::string> plant_facts(const std::vector<Fact>& facts, FillerText filler,
                                int64_t max_tokens, int64_t clear_tokens,
                                const TokenCounter& count);

}  // namespace clo
