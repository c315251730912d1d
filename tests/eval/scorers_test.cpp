// Every score against values worked out by hand from the published definitions.
#include "eval/scorers.h"

#include <gtest/gtest.h>

namespace clo {
namespace {

double score(Metric metric, std::vector<std::string> answers, std::string_view answer,
             bool first_line = false) {
  EvalItem item;
  item.metric = metric;
  item.answers = std::move(answers);
  item.first_line = first_line;
  return score_answer(item, answer);
}

using Words = std::vector<std::string>;

TEST(Normalise, LowerCaseNoPunctuationNoArticles) {
  EXPECT_EQ(normalise_english("  The cat's  hat, and an Apple: A-1!"), "cats hat and apple a1");
  EXPECT_EQ(normalise_english("theatre another"), "theatre another");
  EXPECT_EQ(normalise_english("the a an"), "");
}

TEST(F1, CountsWordsInCommonOnce) {
  // Answer: 4 words, reference: 3, in common 2 (one "red" only): P 1/2, R 2/3.
  EXPECT_DOUBLE_EQ(score(Metric::kF1, {"red blue sky"}, "red red blue car"), 4.0 / 7);
  EXPECT_DOUBLE_EQ(score(Metric::kF1, {"the Eiffel Tower"}, "It is Eiffel tower."), 2 * .5 / 1.5);
  EXPECT_DOUBLE_EQ(score(Metric::kF1, {"blue"}, "red"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kF1, {"blue"}, ""), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kF1, {"nothing", "red car"}, "red car"), 1);  // the best reference
}

TEST(F1, ChineseCharactersAreTokens) {
  EXPECT_EQ(chinese_characters("北京，Ab 。"), (Words{"北", "京", "a", "b"}));
  // 北京市 against 北京大学: 2 of 3 and 2 of 4.
  EXPECT_DOUBLE_EQ(score(Metric::kF1Chinese, {"北京大学"}, "北京市。"),
                   2 * (2.0 / 3) * .5 / (7.0 / 6));
}

TEST(RougeL, IsTheLongestCommonSubsequence) {
  EXPECT_DOUBLE_EQ(lcs_f1({"a", "b", "c", "d"}, {"a", "c", "x", "d"}), 0.75);
  EXPECT_DOUBLE_EQ(lcs_f1({"a"}, {}), 0);
  // "police killed the gunman" / "police kill the gunman": 3 words in order of 4 and 4.
  EXPECT_DOUBLE_EQ(score(Metric::kRougeL, {"police killed the gunman"}, "police kill the gunman"),
                   0.75);
  EXPECT_DOUBLE_EQ(score(Metric::kRougeL, {"police killed the gunman"}, "the gunman kill police"),
                   0.5);
  EXPECT_DOUBLE_EQ(score(Metric::kRougeLChinese, {"我爱北京"}, "我在北京"), 0.75);
}

TEST(Recall, IsTheShareOfTheReferenceInTheCommonSubsequence) {
  EXPECT_DOUBLE_EQ(lcs_recall({"x", "a", "y", "b", "d"}, {"a", "b", "c", "d"}), 0.75);
  EXPECT_DOUBLE_EQ(lcs_recall({"d", "c"}, {"c", "d"}), 0.5);  // in order
  EXPECT_DOUBLE_EQ(lcs_recall({}, {"a"}), 0);
  EXPECT_DOUBLE_EQ(lcs_recall({"a"}, {}), 0);
}

TEST(Class, TheOneNamedCountsInFull) {
  const std::vector<std::string> classes = {"City", "Other city", "Date", "Speed"};
  EXPECT_DOUBLE_EQ(class_score("City", "City", classes), 1);
  EXPECT_DOUBLE_EQ(class_score("City or Date", "City", classes), 0.5);
  EXPECT_DOUBLE_EQ(class_score("Speed", "City", classes), 0);
  // A class that is a part of the reference is no guess of its own.
  EXPECT_DOUBLE_EQ(class_score("Food: Fruit", "Food: Fruit", {"Food", "Food: Fruit", "Fruit"}), 1);
  EXPECT_DOUBLE_EQ(class_score("Food", "Food: Fruit", {"Food", "Food: Fruit"}), 0);
}

TEST(Integers, AreFoundInText) {
  EXPECT_EQ(integers_in("a12b-3 007 5.0 0", true), (Words{"12", "-3", "7", "5", "0", "0"}));
  EXPECT_EQ(integers_in("x-3", false), (Words{"3"}));
  EXPECT_DOUBLE_EQ(integer_share("Paragraph 12, not 3", "Paragraph 12"), 0.5);
  EXPECT_DOUBLE_EQ(integer_share("段落12", "段落12"), 1);
  EXPECT_DOUBLE_EQ(integer_share("none", "12"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kFirstNumber, {"12345"}, " 12345. 9"), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kFirstNumber, {"12345"}, "123456"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kFirstNumber, {"12345"}, "9, 12345"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kLastInteger, {"210"}, "100 + 110 = 210."), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kLastInteger, {"210"}, "210, I think, at step 2"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kLastWordInteger, {"-7"}, "it returns -7."), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kLastWordInteger, {"7"}, "it returns x7"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kLastWordInteger, {"7"}, ""), 0);
}

TEST(Code, TheFirstLineIsCompared) {
  EXPECT_EQ(first_code_line("\n```python\n# a\nreturn x // 2\nreturn x\n"), "return x");
  EXPECT_EQ(first_code_line("# only a comment"), "");
  // "abcd" and "abxd": 3 in common of 4 and 4.
  EXPECT_DOUBLE_EQ(edit_ratio("abcd", "abxd"), 0.75);
  EXPECT_DOUBLE_EQ(edit_ratio("abc", "abcd"), 0.86);  // 6 / 7 in whole percents
  EXPECT_DOUBLE_EQ(edit_ratio("abc", "xyz"), 0);
  EXPECT_DOUBLE_EQ(edit_ratio("", "xyz"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kEditSimilarity, {"return x"}, "# so\nreturn x\nmore"), 1);
}

TEST(Match, ReferencesOccurInAnyCase) {
  EXPECT_DOUBLE_EQ(score(Metric::kMatchAll, {"AB", "cd", "ef"}, "ab and CD"), 2.0 / 3);
  EXPECT_DOUBLE_EQ(score(Metric::kMatchAll, {"a b"}, "a\tb"), 0);  // a tab becomes a line end
  EXPECT_DOUBLE_EQ(score(Metric::kMatchPart, {"AB", "cd"}, "x ab"), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kMatchPart, {"AB", "cd"}, "x"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kSubspan, {"The Old Mill"}, "in old mill!"), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kSubspan, {"The Old Mill"}, "mill, old"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kSubstring, {"find_cat"}, "it is find_cat()"), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kSubstring, {"find_cat"}, "Find_cat"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kRecordFields, {"Mr. Fox", "an inn"}, "it is mr fox"), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kRecordFields, {"Mr. Fox", "an inn"}, "fox"), 0);
}

TEST(KvWord, TheValueIsAWholeWord) {
  const std::string value = "1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b";
  EXPECT_DOUBLE_EQ(score(Metric::kKvWord, {value}, "\"" + value + "\"."), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kKvWord, {value}, value + "0"), 0);
  EXPECT_DOUBLE_EQ(score(Metric::kKvWord, {value}, value.substr(1)), 0);
}

TEST(PrefixShare, StopsAtTheFirstFault) {
  EXPECT_DOUBLE_EQ(prefix_share("3, 4, 5, 9", "3, 4, 6, 9"), 0.5);
  EXPECT_DOUBLE_EQ(prefix_share("[3, 4", "3, 4, 6, 9"), 0.5);
  EXPECT_DOUBLE_EQ(prefix_share("3 4 6 9 1", "3, 4, 6, 9"), 1);
  EXPECT_DOUBLE_EQ(prefix_share("", "3"), 0);
}

TEST(WordRecall, CountsDistinctWordsOfTheReference) {
  EXPECT_DOUBLE_EQ(word_recall("the CAT sat", "The cat sat the mat."), 3.0 / 4);
  EXPECT_DOUBLE_EQ(word_recall("", "The cat"), 0);
}

TEST(FirstLine, IsAllThatCountsWhereAskedFor) {
  EXPECT_DOUBLE_EQ(score(Metric::kF1, {"red car"}, "\nred car\nblue sky", true), 1);
  EXPECT_DOUBLE_EQ(score(Metric::kF1, {"red car"}, "\nred car\nblue sky", false), 2.0 / 3);
}

}  // namespace
}  // namespace clo
