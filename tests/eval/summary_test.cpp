// What items say together: means and intervals, figures of suites, and the lines they are kept in.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "eval/html_report.h"
#include "eval/suite_figures.h"
#include "eval/suite_summary.h"
#include "eval/suites.h"

namespace clo {
namespace {

ItemRecord record(const std::string& task, int64_t context, int64_t index, double dense,
                  double other) {
  ItemRecord item;
  item.id = "suite/" + task + "/" + std::to_string(context) + "/" + std::to_string(index);
  item.task = task;
  item.context = context;
  item.index = index;
  item.results[kDenseName].score = dense;
  item.results["other"].score = other;
  item.results["other"].decode_steps = 10;
  item.results["other"].row_bytes = 256;
  item.results["other"].counters.rows_fetched = 100 * (index + 1);
  return item;
}

const std::vector<std::string> kPolicies = {kDenseName, "other"};

TEST(PairedMean, BinaryScoresHaveThePairedInterval) {
  const PairedMean mean = paired_mean({1, 1, 1, 0, 0}, {1, 0, 1, 0, 1});
  EXPECT_DOUBLE_EQ(mean.first, 60);
  EXPECT_DOUBLE_EQ(mean.second, 60);
  PairedCounts counts{5, 2, 1, 1};
  ASSERT_TRUE(mean.interval);
  EXPECT_DOUBLE_EQ(mean.interval->low, paired_difference(counts).low);
  EXPECT_FALSE(paired_mean({1}, {0}).interval);
  EXPECT_DOUBLE_EQ(paired_mean({1}, {0}).difference(), -100);
}

TEST(PairedMean, FewScoresAreNotDrawn) {
  EXPECT_FALSE(paired_mean({0.5, 1, 0, 0}, {0.5, 0.5, 0, 0}).interval);
  EXPECT_TRUE(paired_mean({0.5, 1, 0, 0, 0}, {0.5, 0.5, 0, 0, 0}).interval);
}

TEST(PairedMean, OtherScoresAreDrawnAgain) {
  std::vector<double> first, second;
  for (int i = 0; i < 100; ++i) {
    first.push_back(0.5);
    second.push_back(i % 2 == 0 ? 0.4 : 0.2);
  }
  const PairedMean mean = paired_mean(first, second);
  EXPECT_NEAR(mean.difference(), -20, 1e-9);
  ASSERT_TRUE(mean.interval);
  // The mean of 100 draws of 10 and 30 has a standard deviation of 1 point.
  EXPECT_NEAR(mean.interval->low, -21.96, 0.5);
  EXPECT_NEAR(mean.interval->high, -18.04, 0.5);
  EXPECT_DOUBLE_EQ(paired_mean(first, second).interval->low, mean.interval->low);
}

TEST(Summary, HasARowForEachTaskContextAndPolicyAndTheirMean) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 4; ++i) {
    records.push_back(record("b", 100, i, 1, i % 2 == 0));
    records.push_back(record("a", 100, i, 0.5, 0.25));
    records.push_back(record("a", 200, i, 0, 0));
  }
  const auto rows = summarise(records, kPolicies);
  std::vector<std::string> names;
  for (const SummaryRow& row : rows) {
    names.push_back(std::to_string(row.context) + row.task + row.policy);
  }
  EXPECT_EQ(names,
            (std::vector<std::string>{"100bdense", "100bother", "100adense", "100aother",
                                      "100alldense", "100allother", "200adense", "200aother"}));
  EXPECT_DOUBLE_EQ(rows[1].scores.second, 50);
  EXPECT_DOUBLE_EQ(rows[1].scores.first, 100);
  EXPECT_DOUBLE_EQ(rows[1].bytes_per_token, 256 * (100 + 200 + 300 + 400) / 40.0);
  EXPECT_DOUBLE_EQ(rows[5].scores.second, 37.5);
  EXPECT_EQ(rows[5].scores.items, 8);
}

TEST(Figures, AdjacentAndSeparatedAreComparedWithinAWorld) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 8; ++i) {
    ItemRecord item = record("2_hops", 100, i, 1, i % 4 < 2 ? 1 : 0.5);
    item.numbers["world"] = static_cast<double>(i / 4);
    item.labels["layout"] = i % 4 < 2 ? "adjacent" : "separated";
    item.labels["order"] = i % 2 == 0 ? "forward" : "reversed";
    records.push_back(item);
  }
  const auto figures = suite_figures("multihop", records, kPolicies);
  ASSERT_EQ(figures.size(), 4u);
  EXPECT_EQ(figures[2].policy, "other");
  EXPECT_EQ(figures[2].name, "separated - adjacent");
  EXPECT_DOUBLE_EQ(figures[2].value, -50);
  EXPECT_DOUBLE_EQ(figures[3].value, 0);
}

// Five worlds, each adjacent once and separated twice.
TEST(Figures, SetsAreComparedWithinAWorld) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 15; ++i) {
    ItemRecord item = record("2_hops", 100, i, 1, 1);
    item.numbers["world"] = static_cast<double>(i / 3);
    item.labels["layout"] = i % 3 == 0 ? "adjacent" : "separated";
    item.labels["order"] = "forward";
    // 0.5 adjacent, 0.25 and 0.35 separated; one mode and three.
    const double overlaps[] = {5, 2.5, 3.5}, modes[] = {8, 24, 24};
    item.results["other"].sets = SetFigures{overlaps[i % 3], 10, modes[i % 3], 8};
    item.results[kDenseName].sets = SetFigures{0, 0, 16, 8};
    records.push_back(item);
  }
  const auto figures = suite_figures("multihop", records, kPolicies);
  std::map<std::string, SuiteFigure> other, dense;
  for (const SuiteFigure& figure : figures) {
    (figure.policy == "other" ? other : dense)[figure.name] = figure;
  }
  EXPECT_NEAR(other["set overlap, adjacent"].value, 0.5, 1e-12);
  EXPECT_NEAR(other["set overlap, separated"].value, 0.3, 1e-12);
  const SuiteFigure& overlap = other["set overlap, separated - adjacent"];
  EXPECT_EQ(figure_value(overlap), "-0.200");
  // Every world has the same difference, so every draw has.
  EXPECT_EQ(figure_interval(overlap), "-0.200 to -0.200");
  EXPECT_EQ(figure_value(other["modes, adjacent"]), "1.000");
  EXPECT_EQ(figure_value(other["modes, separated - adjacent"]), "+2.000");
  EXPECT_EQ(dense.count("set overlap, adjacent"), 0u);
  EXPECT_EQ(figure_value(dense["modes, separated - adjacent"]), "+0.000");
}

TEST(Figures, LengthHasThreeWays) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 4; ++i) {
    records.push_back(record("none", 100, i, 1, 1));
    records.push_back(record("prose_start", 100, i, i < 3, i < 1));
  }
  const auto figures = suite_figures("length", records, kPolicies);
  ASSERT_EQ(figures.size(), 3u);
  EXPECT_DOUBLE_EQ(figures[0].value, -25);  // B - A
  EXPECT_DOUBLE_EQ(figures[1].value, -50);  // C - B
  EXPECT_DOUBLE_EQ(figures[2].value, -75);  // C - A
}

// Scores of Llama-3.1-8B as RULER's table has them, with the table's averages and effective length.
TEST(Figures, RulersEffectiveLengthAndAveragesAreThePublishedOnes) {
  const double published[] = {95.5, 93.8, 91.6, 87.4, 84.7, 77.0};
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 6; ++i) {
    for (const std::string& task : find_suite("ruler")->tasks) {
      // An average over tasks, not items: the task that differs from the others has more of them.
      const bool differs = task == "vt";
      const double dense = published[i] / 100 + (differs ? 0.012 : -0.001);
      for (int64_t item = 0; item < (differs ? 9 : 1); ++item) {
        records.push_back(record(task, 4096 << i, item, dense, i == 0 ? dense : dense / 2));
      }
    }
  }
  const auto figures = suite_figures("ruler", records, kPolicies);
  ASSERT_EQ(figures.size(), 8u);
  EXPECT_EQ(figures[0].name, "effective length");
  EXPECT_EQ(figures[0].value, 32768);
  EXPECT_EQ(figure_value(figures[0]), "32768");
  EXPECT_EQ(figures[0].note, "");
  EXPECT_EQ(figures[0].context, 0);
  EXPECT_EQ(figure_value(figures[1]), "88.3");
  EXPECT_EQ(figures[2].name, "wAvg. (inc)");
  EXPECT_EQ(figure_value(figures[2]), "85.4");
  EXPECT_EQ(figures[3].name, "wAvg. (dec)");
  EXPECT_EQ(figure_value(figures[3]), "91.3");
  EXPECT_EQ(figures[4].policy, "other");
  EXPECT_EQ(figures[4].value, 4096);
}

TEST(Figures, RulersEffectiveLengthSaysWhatItIsNot) {
  std::vector<ItemRecord> records = {record("vt", 4096, 0, 0.856, 0.85),
                                     record("vt", 8192, 0, 0.9, 0.8)};
  auto figures = suite_figures("ruler", records, kPolicies);
  ASSERT_EQ(figures.size(), 8u);
  EXPECT_EQ(figures[0].value, 8192);
  EXPECT_EQ(figures[0].note, "of 1 of 13 tasks: not RULER's figure; the longest of this run");
  EXPECT_EQ(figures[1].note, "of 1 of 13 tasks: not RULER's figure");
  EXPECT_EQ(figure_value(figures[4]), "none");
  EXPECT_EQ(figures[4].note,
            "of 1 of 13 tasks: not RULER's figure; no length of this run reaches 85.6");
  // The threshold itself is reached.
  records.pop_back();
  EXPECT_EQ(suite_figures("ruler", records, kPolicies)[0].value, 4096);
}

TEST(Figures, PositionsAreBinned) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 6; ++i) {
    records.push_back(record("code", 100, i, 1, i < 2 ? 1 : 0.25));
    records.back().numbers["bin"] = static_cast<double>(i / 2);
  }
  const auto figures = suite_figures("position", records, kPolicies);
  ASSERT_EQ(figures.size(), 6u);
  EXPECT_EQ(figures[2].name, "standard deviation over bins");
  EXPECT_DOUBLE_EQ(figures[2].value, 0);  // dense is right everywhere
  EXPECT_DOUBLE_EQ(figures[3].value, 50);
  EXPECT_DOUBLE_EQ(figures[4].value, 75);
  // 100, 25, 25: squares about 50 are 2500, 625, 625.
  EXPECT_NEAR(figures[5].value, std::sqrt(1250.0), 1e-9);
  EXPECT_EQ(figure_value(figures[5]), "35.4");
}

// Rows are added up within a bin before bins are compared: 30 of 40, 10 of 20, 5 of 20.
TEST(Figures, GoldHasItsSpreadOverPositions) {
  std::vector<ItemRecord> records;
  const int64_t watched[] = {10, 30, 20, 20}, attended[] = {0, 30, 10, 5};
  const double bins[] = {0, 0, 1, 2};
  for (int64_t i = 0; i < 4; ++i) {
    records.push_back(record("code", 100, i, 1, 1));
    records.back().numbers["bin"] = bins[i];
    KvCounters& counters = records.back().results["other"].counters;
    counters.watched_rows = watched[i];
    counters.watched_rows_attended = attended[i];
  }
  auto figures = suite_figures("position", records, kPolicies);
  ASSERT_EQ(figures.size(), 9u);  // dense chooses no sets
  EXPECT_EQ(figures[6].name, "gold: average over bins");
  EXPECT_EQ(figures[6].policy, "other");
  EXPECT_DOUBLE_EQ(figures[6].value, 50);
  EXPECT_DOUBLE_EQ(figures[7].value, 50);
  EXPECT_NEAR(figures[8].value, std::sqrt(2 * 625.0 / 3), 1e-9);
  // An answer that ended at once leaves its bin without a step: no spread is made up.
  records[3].results["other"].counters.watched_rows = 0;
  EXPECT_EQ(suite_figures("position", records, kPolicies).size(), 6u);
}

TEST(Figures, RecitationsAreAveragedWhereThereAreSome) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 4; ++i) records.push_back(record("none", 100, i, 1, i % 2));
  records[1].results["other"].recitation = Recitation{"", 1, 1, true};
  records[2].results["other"].recitation = Recitation{"", 1, 1, true};
  records[3].results["other"].recitation = Recitation{"", 0.25, 0.5, false};
  const auto figures = suite_figures("length", records, kPolicies);
  ASSERT_EQ(figures.size(), 4u);
  EXPECT_EQ(figures[0].name, "evidence recited exactly");
  EXPECT_NEAR(figures[0].value, 200.0 / 3, 1e-9);
  EXPECT_DOUBLE_EQ(figures[1].value, 75);
  EXPECT_NEAR(figures[2].value, 250.0 / 3, 1e-9);
  EXPECT_EQ(figures[3].name, "score where exactly recited");
  EXPECT_DOUBLE_EQ(figures[3].value, 50);
}

TEST(Lines, HoldARecordWhole) {
  ItemRecord item = record("a", 100, 3, 0.5, 1.0 / 3);
  item.metric = "f1";
  item.answers = {"x", "\xe4\xb8\xad"};
  item.numbers["depth"] = 0.25;
  item.labels["filler"] = "prose";
  item.gold_tokens = 7;
  PolicyRecord& other = item.results["other"];
  other.answer = "line\n\"quoted\"";
  other.recitation = Recitation{"r\ns", 0.5, 0.75, false};
  item.masked_tokens = 41;
  other.sets = SetFigures{1.5, 3, 7, 4};
  other.counters.hits = 3;
  other.counters.mass_kept = 0.1;
  other.counters.watched_rows = 70;
  other.counters.watched_rows_attended = 7;
  other.layer_gold = {0.1, 0.2};
  const std::string line = to_line(item);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto back = from_line(line, "here");
  ASSERT_TRUE(back) << back.error().to_string();
  EXPECT_EQ(to_line(*back), line);
  EXPECT_EQ(back->results.at("other").counters.watched_rows_attended, 7);
  EXPECT_EQ(back->masked_tokens, 41);
  ASSERT_TRUE(back->results.at("other").recitation);
  EXPECT_EQ(back->results.at("other").recitation->tokens, 0.75);
  EXPECT_FALSE(back->dense().recitation);
  ASSERT_TRUE(back->results.at("other").sets);
  EXPECT_EQ(back->results.at("other").sets->mean_overlap(), 0.5);
  EXPECT_EQ(back->results.at("other").sets->mean_modes(), 1.75);
  EXPECT_FALSE(back->dense().sets);
  EXPECT_EQ(from_line("{}", "here").error().where, "here");
  EXPECT_FALSE(from_line(line.substr(0, line.size() / 2), "here"));
}

// Curves of scores for both policies, and of the evidence for the one that chooses sets.
TEST(Html, PositionsHaveCurvesOfScoresAndOfEvidence) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 4; ++i) {
    records.push_back(record("code", 100, i, 1, 0));
    records.back().numbers = {{"bin", static_cast<double>(i / 2)}, {"bins", 2}, {"depth", 0.25}};
    records.back().results["other"].counters.watched_rows = 10 * (i + 1);
    records.back().results["other"].counters.watched_rows_attended = 10;
  }
  const auto rows = summarise(records, kPolicies);
  const auto figures = suite_figures("position", records, kPolicies);
  const HtmlInput input{"position", "m", {}, kPolicies, &records, &rows, &figures};
  const std::string page = html_report(input);
  const size_t scores = page.find("<h2>By position</h2>");
  const size_t evidence = page.find("<h2>Evidence attended, by position</h2>");
  ASSERT_NE(scores, std::string::npos);
  ASSERT_NE(evidence, std::string::npos);
  const auto curves_in = [&](size_t begin, size_t end) {
    int64_t count = 0;
    for (size_t at = page.find("<polyline", begin); at < end; at = page.find("<polyline", at + 1)) {
      ++count;
    }
    return count;
  };
  EXPECT_EQ(curves_in(scores, evidence), 2);
  EXPECT_EQ(curves_in(evidence, page.find("<h2>", evidence + 1)), 1);
}

TEST(Html, EscapesWhatPeopleWrite) {
  std::vector<ItemRecord> records = {record("<task>", 100, 0, 1, 1)};
  const auto rows = summarise(records, kPolicies);
  const std::vector<SuiteFigure> figures;
  HtmlInput input{"suite", "<model> & \"co\"", {{"command", "<b>"}}, kPolicies, &records, &rows,
                  &figures};
  const std::string page = html_report(input);
  EXPECT_NE(page.find("&lt;model&gt; &amp; &quot;co&quot;"), std::string::npos);
  EXPECT_EQ(page.find("<task>"), std::string::npos);
  EXPECT_EQ(page.find("<b>\n"), std::string::npos);
}

}  // namespace
}  // namespace clo
