#include "eval/documents.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <span>

#include "base/try.h"
#include "eval/prose.h"
#include "eval/words.h"

namespace clo {

namespace {

std::string_view subject(FactForm form) {
  switch (form) {
    case FactForm::kNumber:
      return "special magic number";
    case FactForm::kWord:
      return "secret word";
    case FactForm::kCode:
      return "access code";
  }
  return "";
}

}  // namespace

std::string_view fact_form_name(FactForm form) {
  switch (form) {
    case FactForm::kNumber:
      return "number";
    case FactForm::kWord:
      return "word";
    case FactForm::kCode:
      return "code";
  }
  return "";
}

std::string Fact::statement() const {
  return "The " + std::string(subject(form)) + " for " + key + " is: " + value + ".";
}

std::string Fact::question() const {
  return "What is the " + std::string(subject(form)) + " for " + key + "?";
}

Fact make_fact(FactForm form, ItemRandom& random) {
  Fact fact;
  fact.form = form;
  fact.key = std::string(pick(adjectives(), random)) + "-" + std::string(pick(nouns(), random));
  fact.depth = random.uniform();
  switch (form) {
    case FactForm::kNumber:
      fact.value = std::to_string(1'000'000 + random.below(9'000'000));
      break;
    case FactForm::kWord:
      fact.value = pick(nouns(), random);
      break;
    case FactForm::kCode:
      for (int i = 0; i < 8; ++i) fact.value += "0123456789abcdef"[random.below(16)];
      break;
  }
  return fact;
}

bool is_right(const Fact& fact, std::string_view answer) {
  const std::string_view line = answer.substr(0, answer.find('\n'));
  const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  for (size_t at = line.find(fact.value); at != std::string_view::npos;
       at = line.find(fact.value, at + 1)) {
    const size_t end = at + fact.value.size();
    const bool free_before = at == 0 || !is_word(line[at - 1]);
    const bool free_after = end == line.size() || !is_word(line[end]);
    if (free_before && free_after) return true;
  }
  return false;
}

FillerText FillerText::prose(uint64_t seed) {
  FillerText filler;
  filler.random_ = ItemRandom(seed);
  return filler;
}

FillerText FillerText::lines_of(std::string text) {
  FillerText filler;
  filler.kind_ = Kind::kLines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    filler.lines_.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return filler;
}

Result<FillerText> FillerText::licences(uint64_t seed, const std::string& folder) {
  // Links to other versions would repeat a text; the real files are enough.
  std::set<std::filesystem::path> files;
  std::error_code fault;
  for (const auto& entry : std::filesystem::directory_iterator(folder, fault)) {
    if (entry.is_regular_file() && !entry.is_symlink()) files.insert(entry.path());
  }
  std::string text;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    text.append(std::istreambuf_iterator<char>(file), {});
    text += '\n';
  }
  if (text.empty()) {
    return Error{ErrorCode::kBadFile, "expected the licence texts of a Debian system, found none",
                 folder};
  }
  FillerText filler = lines_of(std::move(text));
  filler.kind_ = Kind::kLoop;
  ItemRandom random(seed);
  filler.at_ = random.below(filler.lines_.size());
  return filler;
}

bool FillerText::next(std::string& line) {
  if (kind_ == Kind::kProse) {
    line.clear();
    const uint64_t sentences = 1 + random_.below(5);
    for (uint64_t i = 0; i < sentences; ++i) {
      if (i > 0) line += ' ';
      line += prose_sentence(random_);
    }
    return true;
  }
  if (at_ == lines_.size()) {
    if (kind_ == Kind::kLines) return false;
    at_ = 0;
  }
  line = lines_[at_++];
  return true;
}

Result<std::string> plant_facts(const std::vector<Fact>& facts, FillerText filler,
                                int64_t max_tokens, int64_t clear_tokens,
                                const TokenCounter& count) {
  int64_t budget = max_tokens;
  for (const Fact& fact : facts) {
    CLO_ASSIGN(const int64_t tokens, count(fact.statement() + "\n"));
    budget -= tokens;
  }
  if (budget < clear_tokens) {
    return Error{ErrorCode::kBadRequest,
                 std::to_string(facts.size()) + " facts and the " + std::to_string(clear_tokens) +
                     " tokens after them do not fit in " + std::to_string(max_tokens) + " tokens",
                 ""};
  }
  struct Line {
    std::string text;
    int64_t tokens = 0;
  };
  std::vector<Line> lines;
  int64_t total = 0;
  for (std::string line; filler.next(line);) {
    CLO_ASSIGN(const int64_t tokens, count(line + "\n"));
    if (total + tokens > budget) break;
    total += tokens;
    lines.push_back({line, tokens});
  }

  std::vector<const Fact*> order;
  for (const Fact& fact : facts) order.push_back(&fact);
  std::stable_sort(order.begin(), order.end(),
                   [](const Fact* a, const Fact* b) { return a->depth < b->depth; });
  const auto assemble = [&] {
    // A fact stands before the first line that begins at or after its depth, but never so late
    // that fewer than clear_tokens follow.
    const auto last = static_cast<double>(std::max<int64_t>(0, total - clear_tokens));
    std::string text;
    size_t next = 0;
    int64_t before = 0;
    for (const Line& line : lines) {
      while (next < order.size() &&
             order[next]->depth * last < static_cast<double>(before + line.tokens)) {
        text += order[next++]->statement() + "\n";
      }
      text += line.text + "\n";
      before += line.tokens;
    }
    while (next < order.size()) text += order[next++]->statement() + "\n";
    if (!text.empty()) text.pop_back();
    return text;
  };
  // Tokens of lines add up only nearly: the whole decides.
  std::string text = assemble();
  while (true) {
    CLO_ASSIGN(const int64_t tokens, count(text));
    if (tokens <= max_tokens || lines.empty()) return text;
    total -= lines.back().tokens;
    lines.pop_back();
    text = assemble();
  }
}

}  // namespace clo
