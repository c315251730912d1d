#pragma once
// Scores of answers in [0, 1], one function for each published definition. Pure functions of texts;
// docs/evaluation.md says which suite uses which and where a definition departs from its source.
#include <string>
#include <string_view>
#include <vector>

#include "eval/item.h"

namespace clo {

// Lower case, ASCII punctuation dropped, the words a, an and the dropped, spaces collapsed.
std::string normalise_english(std::string_view text);
// The characters that are neither white space nor punctuation (ASCII and CJK), ASCII in lower case.
std::vector<std::string> chinese_characters(std::string_view text);

// Multiset F1 of tokens; 0 when nothing is in common.
double token_f1(const std::vector<std::string>& answer, const std::vector<std::string>& reference);
// F1 of the longest common subsequence, over the whole text.
double lcs_f1(const std::vector<std::string>& answer, const std::vector<std::string>& reference);

// Share of the reference that is in its longest common subsequence with the answer; 0 without one.
double lcs_recall(const std::vector<std::string>& answer,
                  const std::vector<std::string>& reference);

// 2 M / (|a| + |b|) with M the longest common subsequence of bytes, rounded to whole percents (the
// ratio of the fuzz libraries).
double edit_ratio(std::string_view a, std::string_view b);
// The first line without a backtick, '#' or "//"; empty without one.
std::string_view first_code_line(std::string_view answer);

// 1 / (classes left) when `reference` is among the classes that occur in the answer, after those
// that are proper parts of the reference are dropped.
double class_score(std::string_view answer, std::string_view reference,
                   const std::vector<std::string>& classes);
// Of the integers in the answer, the share that equals the first integer of the reference.
double integer_share(std::string_view answer, std::string_view reference);
// Correct running values before the first wrong or missing one, over all of them.
double prefix_share(std::string_view answer, std::string_view reference);
// Of the distinct words of the reference, in lower case, the share that occurs in the answer.
double word_recall(std::string_view answer, std::string_view reference);

// Unsigned runs of digits, or with a minus sign right before them; leading zeros dropped.
std::vector<std::string> integers_in(std::string_view text, bool with_sign);

// The item's metric over its references: the best of them, but kMatchAll's share.
double score_answer(const EvalItem& item, std::string_view answer);

}  // namespace clo
