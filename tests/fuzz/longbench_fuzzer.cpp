// Any text as a file of LongBench: an accepted one gives items whose prompts are text, within the
// length that was asked for, and can be scored.
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/utf8.h"
#include "eval/longbench_data.h"
#include "eval/scorers.h"
#include "json_mutation.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto suite =
      clo::parse_longbench({{"input", std::string(reinterpret_cast<const char*>(data), size)}});
  if (!suite) {
    CLO_CHECK(!suite.error().message.empty() && !suite.error().where.empty());
    return 0;
  }
  for (const std::string& task : suite->tasks) {
    clo::SuiteRequest request;
    request.suite = suite->name;
    request.task = task;
    request.context = 1000;
    request.count = [](const clo::EvalItem& item) -> clo::Result<int64_t> {
      return std::ssize(item.text) + std::ssize(item.answer_prefix);
    };
    const auto item = suite->make(request);
    if (!item) continue;  // the question alone is too long
    CLO_CHECK(clo::find_invalid_utf8(item->text) == item->text.size());
    CLO_CHECK(clo::find_invalid_utf8(item->answer_prefix) == item->answer_prefix.size());
    for (const std::string& answer : {item->answers.front(), item->text}) {
      const double score = clo::score_answer(*item, answer);
      CLO_CHECK(score >= 0 && score <= 1, score);
    }
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr std::array<std::string_view, 8> kFragments = {
      R"("dataset":"trec","all_classes":["a","b"],)",
      R"("dataset":"lcc",)",
      R"("dataset":"multifieldqa_zh",)",
      R"("dataset":"passage_count_e",)",
      R"("answers":["12","b c"],)",
      R"("length":7,)",
      R"("context":"\u5317\u4eac a\n\nb",)",
      R"("input":"Q\nType:",)"};
  std::minstd_rand random(seed);
  if (random() % 3 != 0) return LLVMFuzzerMutate(data, size, max_size);
  return clo::insert_json_fragment(data, 0, size, max_size, kFragments, random);
}
