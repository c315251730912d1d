#include "eval/scorers.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <set>

#include "eval/text_pieces.h"

namespace clo {

namespace {

bool is_punctuation(char c) { return std::ispunct(static_cast<unsigned char>(c)) != 0; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Length of the longest common subsequence.
template <typename Sequence>
size_t lcs_length(const Sequence& a, const Sequence& b) {
  std::vector<size_t> row(b.size() + 1, 0);
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = 0;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = a[i] == b[j] ? diagonal + 1 : std::max(above, row[j]);
      diagonal = above;
    }
  }
  return row[b.size()];
}

double f1(size_t common, size_t answer, size_t reference) {
  if (common == 0) return 0;
  const double precision = static_cast<double>(common) / static_cast<double>(answer);
  const double recall = static_cast<double>(common) / static_cast<double>(reference);
  return 2 * precision * recall / (precision + recall);
}

// RULER's clean-up of an answer: control characters become line ends, the ends are trimmed.
std::string clean(std::string_view answer) {
  std::string text(answer);
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = '\n';
  }
  return std::string(trimmed(text));
}

bool occurs(std::string_view piece, std::string_view text) {
  return text.find(piece) != std::string_view::npos;
}

bool kv_word(std::string_view answer, std::string_view value) {
  std::string text(answer);
  for (char& c : text) {
    if (occurs(std::string_view(&c, 1), "\n:\"'.,?!{}")) c = ' ';
  }
  const std::vector<std::string> words = split_words(text);
  return std::find(words.begin(), words.end(), value) != words.end();
}

std::string without_dots(std::string_view text) {
  std::string out = lower_case(text);
  std::erase(out, '.');
  return out;
}

bool last_word_integer(std::string_view answer, std::string_view reference) {
  const std::vector<std::string> words = split_words(answer);
  if (words.empty()) return false;
  std::string_view word = words.back();
  while (!word.empty() && word.back() == '.') word.remove_suffix(1);
  const std::vector<std::string> found = integers_in(word, true);
  return found.size() == 1 && found[0] == word && word == reference;
}

double score_one(const EvalItem& item, std::string_view answer, std::string_view reference) {
  switch (item.metric) {
    case Metric::kMatchAll:
    case Metric::kMatchPart:
      return occurs(lower_case(reference), lower_case(clean(answer)));
    case Metric::kF1:
      return token_f1(split_words(normalise_english(answer)),
                      split_words(normalise_english(reference)));
    case Metric::kF1Chinese:
      return token_f1(chinese_characters(answer), chinese_characters(reference));
    case Metric::kRougeL:
      return lcs_f1(split_words(answer), split_words(reference));
    case Metric::kRougeLChinese:
      return lcs_f1(chinese_characters(answer), chinese_characters(reference));
    case Metric::kClass:
      return class_score(answer, reference, item.classes);
    case Metric::kIntegerShare:
      return integer_share(answer, reference);
    case Metric::kEditSimilarity:
      return edit_ratio(first_code_line(answer), reference);
    case Metric::kSubspan:
      return occurs(normalise_english(reference), normalise_english(answer));
    case Metric::kFirstNumber: {
      const std::vector<std::string> found = integers_in(answer, false);
      return !found.empty() && found.front() == reference;
    }
    case Metric::kLastInteger: {
      const std::vector<std::string> found = integers_in(answer, true);
      return !found.empty() && found.back() == reference;
    }
    case Metric::kLastWordInteger:
      return last_word_integer(answer, reference);
    case Metric::kKvWord:
      return kv_word(answer, reference);
    case Metric::kPrefixShare:
      return prefix_share(answer, reference);
    case Metric::kWordRecall:
      return word_recall(answer, reference);
    case Metric::kSubstring:
      return occurs(reference, answer);
    case Metric::kRecordFields:
      return occurs(without_dots(reference), without_dots(answer));
  }
  return 0;
}

}  // namespace

std::string normalise_english(std::string_view text) {
  std::string kept;
  for (const char c : lower_case(text)) {
    if (!is_punctuation(c)) kept += c;
  }
  std::string out;
  for (const std::string& word : split_words(kept)) {
    if (word == "a" || word == "an" || word == "the") continue;
    if (!out.empty()) out += ' ';
    out += word;
  }
  return out;
}

std::vector<std::string> chinese_characters(std::string_view text) {
  static const std::set<std::string, std::less<>> kPunctuation = [] {
    std::set<std::string, std::less<>> all;
    for (const std::string& c :
         characters("！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
                    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏《\u3000")) {
      all.insert(c);
    }
    return all;
  }();
  std::vector<std::string> kept;
  for (std::string& c : characters(text)) {
    const auto first = static_cast<unsigned char>(c[0]);
    if (c.size() == 1 && (std::isspace(first) != 0 || is_punctuation(c[0]))) continue;
    if (kPunctuation.contains(c)) continue;
    kept.push_back(lower_case(c));
  }
  return kept;
}

double token_f1(const std::vector<std::string>& answer, const std::vector<std::string>& reference) {
  std::map<std::string_view, int64_t> left;
  for (const std::string& token : reference) ++left[token];
  size_t common = 0;
  for (const std::string& token : answer) {
    const auto found = left.find(token);
    if (found == left.end() || found->second == 0) continue;
    --found->second;
    ++common;
  }
  return f1(common, answer.size(), reference.size());
}

double lcs_f1(const std::vector<std::string>& answer, const std::vector<std::string>& reference) {
  return f1(lcs_length(answer, reference), answer.size(), reference.size());
}

double lcs_recall(const std::vector<std::string>& answer,
                  const std::vector<std::string>& reference) {
  if (reference.empty()) return 0;
  return static_cast<double>(lcs_length(answer, reference)) / static_cast<double>(reference.size());
}

double edit_ratio(std::string_view a, std::string_view b) {
  if (a.empty() || b.empty()) return 0;
  const auto common = static_cast<double>(lcs_length(a, b));
  return std::round(100 * 2 * common / static_cast<double>(a.size() + b.size())) / 100;
}

std::string_view first_code_line(std::string_view answer) {
  while (!answer.empty()) {
    const size_t end = std::min(answer.find('\n'), answer.size());
    const std::string_view line = answer.substr(0, end);
    const bool is_code = !occurs("`", line) && !occurs("#", line) && !occurs("//", line);
    // Empty lines at the very start are no answer yet.
    if (is_code && !line.empty()) return line;
    answer.remove_prefix(std::min(end + 1, answer.size()));
  }
  return {};
}

double class_score(std::string_view answer, std::string_view reference,
                   const std::vector<std::string>& classes) {
  size_t left = 0;
  bool right = false;
  for (const std::string& name : classes) {
    if (!occurs(name, answer)) continue;
    if (name != reference && occurs(name, reference)) continue;
    ++left;
    right = right || name == reference;
  }
  return right ? 1.0 / static_cast<double>(left) : 0;
}

std::vector<std::string> integers_in(std::string_view text, bool with_sign) {
  std::vector<std::string> found;
  for (size_t at = 0; at < text.size();) {
    if (!is_digit(text[at])) {
      ++at;
      continue;
    }
    const bool negative = with_sign && at > 0 && text[at - 1] == '-';
    size_t end = at;
    while (end < text.size() && is_digit(text[end])) ++end;
    while (at + 1 < end && text[at] == '0') ++at;
    found.push_back((negative ? "-" : "") + std::string(text.substr(at, end - at)));
    at = end;
  }
  return found;
}

double integer_share(std::string_view answer, std::string_view reference) {
  const std::vector<std::string> found = integers_in(answer, false);
  const std::vector<std::string> wanted = integers_in(reference, false);
  if (found.empty() || wanted.empty()) return 0;
  return static_cast<double>(std::count(found.begin(), found.end(), wanted.front())) /
         static_cast<double>(found.size());
}

double prefix_share(std::string_view answer, std::string_view reference) {
  const std::vector<std::string> found = integers_in(answer, true);
  const std::vector<std::string> wanted = integers_in(reference, true);
  if (wanted.empty()) return 0;
  const auto [stop, unused] =
      std::mismatch(wanted.begin(), wanted.end(), found.begin(), found.end());
  return static_cast<double>(stop - wanted.begin()) / static_cast<double>(wanted.size());
}

double word_recall(std::string_view answer, std::string_view reference) {
  const auto words = [](std::string_view text) {
    const std::vector<std::string> list = split_words(lower_case(text));
    return std::set<std::string>(list.begin(), list.end());
  };
  const std::set<std::string> wanted = words(reference), found = words(answer);
  if (wanted.empty()) return 0;
  const auto common = std::count_if(wanted.begin(), wanted.end(),
                                    [&](const std::string& word) { return found.contains(word); });
  return static_cast<double>(common) / static_cast<double>(wanted.size());
}

double score_answer(const EvalItem& item, std::string_view answer) {
  if (item.first_line) {
    while (!answer.empty() && answer.front() == '\n') answer.remove_prefix(1);
    answer = answer.substr(0, answer.find('\n'));
  }
  double sum = 0, best = 0;
  for (const std::string& reference : item.answers) {
    const double score = score_one(item, answer, reference);
    sum += score;
    best = std::max(best, score);
  }
  if (item.metric != Metric::kMatchAll) return best;
  return item.answers.empty() ? 0 : sum / static_cast<double>(item.answers.size());
}

}  // namespace clo
