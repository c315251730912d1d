// What items say together: means and intervals, figures of suites, and the lines they are kept in.
#include <gtest/gtest.h>

#include "eval/html_report.h"
#include "eval/suite_summary.h"

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

TEST(Figures, PositionsAreBinned) {
  std::vector<ItemRecord> records;
  for (int64_t i = 0; i < 6; ++i) {
    records.push_back(record("code", 100, i, 1, i < 2 ? 1 : 0.25));
    records.back().numbers["bin"] = static_cast<double>(i / 2);
  }
  const auto figures = suite_figures("position", records, kPolicies);
  ASSERT_EQ(figures.size(), 4u);
  EXPECT_DOUBLE_EQ(figures[2].value, 50);
  EXPECT_DOUBLE_EQ(figures[3].value, 75);
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
  other.recitation = "r";
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
  EXPECT_EQ(from_line("{}", "here").error().where, "here");
  EXPECT_FALSE(from_line(line.substr(0, line.size() / 2), "here"));
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
