// LongBench's files: prompts, lengths, and what is cut.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/utf8.h"
#include "eval/longbench_data.h"

namespace clo {
namespace {

// Characters stand for tokens.
Result<int64_t> count_bytes(const EvalItem& item) {
  return std::ssize(item.text) + 1 + std::ssize(item.answer_prefix);
}

class LongBenchFile : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "longbench_" +
            testing::UnitTest::GetInstance()->current_test_info()->name() + ".jsonl";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  void write(const std::string& lines) { std::ofstream(path_, std::ios::binary) << lines; }
  Result<EvalItem> item(const Suite& suite, int64_t context) {
    SuiteRequest request;
    request.suite = suite.name;
    request.task = suite.tasks.front();
    request.context = context;
    request.count = count_bytes;
    return suite.make(request);
  }
  std::string path_;
};

TEST_F(LongBenchFile, TheMiddleIsCutBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "\xe5\x8c\x97";
  write(R"({"input":"Q","context":"A)" + text +
        R"(B","answers":["x"],"length":9,"dataset":"multifieldqa_zh"})" + "\n");
  const auto suite = load_longbench({path_});
  ASSERT_TRUE(suite) << suite.error().to_string();
  EXPECT_EQ(suite->num_items("multifieldqa_zh", 0, 0), 1);
  for (int64_t context = 500; context < 520; ++context) {
    const auto made = item(*suite, context);
    ASSERT_TRUE(made);
    EXPECT_EQ(find_invalid_utf8(made->text), made->text.size());
    EXPECT_LE(*count_bytes(*made) + made->max_new_tokens, context);
    EXPECT_GT(*count_bytes(*made) + made->max_new_tokens, context - 8);
    EXPECT_NE(made->text.find('A'), std::string::npos);  // both ends stay
    EXPECT_NE(made->text.find('B'), std::string::npos);
    EXPECT_EQ(made->numbers.at("cut"), 1);
  }
  const auto whole = item(*suite, 5000);
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->numbers.at("cut"), 0);
  EXPECT_NE(whole->text.find("A" + text + "B"), std::string::npos);
}

TEST_F(LongBenchFile, ExamplesAreRawAndScoredByTheirFirstLine) {
  write(R"({"input":"Question: Who?\nType:","context":"Question: Where?\nType: Place",)"
        R"("answers":["Person"],"length":9,"dataset":"trec_e","all_classes":["Person","Place"]})"
        "\n");
  const auto suite = load_longbench({path_});
  ASSERT_TRUE(suite) << suite.error().to_string();
  const auto made = item(*suite, 1000);
  ASSERT_TRUE(made);
  EXPECT_EQ(made->task, "trec");
  EXPECT_TRUE(made->raw);
  EXPECT_TRUE(made->first_line);
  EXPECT_EQ(made->answer_prefix, "Type:");
  EXPECT_TRUE(made->text.ends_with("Question: Where?\nType: Place\nQuestion: Who?"));
  EXPECT_EQ(made->classes.size(), 2u);
  EXPECT_EQ(made->max_new_tokens, 64);
}

// The fuzzer's seeds as plain tests: valid_* are accepted, bad_* refused.
TEST(LongBenchCorpus, SeedsAreWhatTheirNamesSay) {
  int num_files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(CLO_SOURCE_DIR "/tests/fuzz/corpus/longbench")) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(bool(load_longbench({entry.path().string()})), name.starts_with("valid_")) << name;
    ++num_files;
  }
  EXPECT_GE(num_files, 6);
}

}  // namespace
}  // namespace clo
