#include "io/generation_config.h"

#include <gtest/gtest.h>

#include "temp_files.h"

namespace clo {
namespace {

ModelConfig small_model() {
  ModelConfig config;
  config.vocab_size = 100;
  config.eos_ids = {7};
  return config;
}
Result<GenerationConfig> parse(const std::string& json) {
  return parse_generation_config(json, "generation_config.json", small_model());
}

TEST(GenerationConfig, AbsentFileMeansTheIdsOfTheModel) {
  const TempFolder folder;
  const auto found = load_generation_config(folder.path(), small_model());
  ASSERT_TRUE(found) << found.error().to_string();
  EXPECT_EQ(found->eos_ids, std::vector<int32_t>{7});
  EXPECT_FALSE(found->temperature || found->top_p || found->min_p || found->top_k ||
               found->repetition_penalty || found->do_sample);
}

TEST(GenerationConfig, ReadsWhatModelsShip) {
  const TempFolder folder;
  folder.write("generation_config.json",
               R"({"bos_token_id": 1, "pad_token_id": 2, "do_sample": true,
    "eos_token_id": [3, 4], "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8,
    "top_k": 20, "min_p": 0.05, "transformers_version": "4.37.0"})");
  const auto found = load_generation_config(folder.path(), small_model());
  ASSERT_TRUE(found) << found.error().to_string();
  EXPECT_EQ(found->eos_ids, (std::vector<int32_t>{3, 4}));
  EXPECT_EQ(found->temperature, 0.7f);
  EXPECT_EQ(found->top_p, 0.8f);
  EXPECT_EQ(found->top_k, 20);
  EXPECT_EQ(found->min_p, 0.05f);
  EXPECT_EQ(found->repetition_penalty, 1.05f);
  EXPECT_EQ(found->do_sample, true);
}

TEST(GenerationConfig, ReadsTheShippedModel) {
  const std::string directory = CLO_SOURCE_DIR "/models/recall-7m";
  const auto config = load_model_config(directory);
  ASSERT_TRUE(config) << config.error().to_string();
  const auto found = load_generation_config(directory, *config);
  ASSERT_TRUE(found) << found.error().to_string();
  EXPECT_EQ(found->eos_ids, (std::vector<int32_t>{2, 0}));
  EXPECT_EQ(found->do_sample, false);
}

TEST(GenerationConfig, NoIdsMeansThoseOfTheModel) {
  for (const char* json : {"{}", "{\"eos_token_id\":null}", "{\"eos_token_id\":[]}"}) {
    const auto found = parse(json);
    ASSERT_TRUE(found) << found.error().to_string();
    EXPECT_EQ(found->eos_ids, std::vector<int32_t>{7});
  }
}

TEST(GenerationConfig, NamesWhatIsOutOfRange) {
  const auto bad = ErrorCode::kBadFile;
  expect_refused(parse("{\"temperature\":-0.1}"), bad, {"temperature", "-0.1"});
  expect_refused(parse("{\"temperature\":\"hot\"}"), bad, {"temperature", "number", "hot"});
  expect_refused(parse("{\"top_p\":1.5}"), bad, {"top_p", "1.5"});
  expect_refused(parse("{\"min_p\":-1}"), bad, {"min_p", "-1"});
  expect_refused(parse("{\"repetition_penalty\":0}"), bad, {"repetition_penalty"});
  // What the sampler would refuse as a flag is the file's fault, and is named as such.
  expect_refused(parse("{\"temperature\":100.5}"), bad, {"temperature", "100.5", "100"});
  expect_refused(parse("{\"top_p\":0}"), bad, {"top_p", "above 0"});
  expect_refused(parse("{\"top_p\":1e-60}"), bad, {"top_p", "above 0"});
  expect_refused(parse("{\"repetition_penalty\":-1}"), bad, {"repetition_penalty", "-1"});
  expect_refused(parse("{\"repetition_penalty\":101}"), bad, {"repetition_penalty", "101"});
  expect_refused(parse("{\"top_k\":-1}"), bad, {"top_k", "-1"});
  expect_refused(parse("{\"top_k\":2147483648}"), bad, {"top_k", "2147483648"});
  expect_refused(parse("{\"top_k\":1.5}"), bad, {"top_k", "integer"});
  expect_refused(parse("{\"do_sample\":1}"), bad, {"do_sample", "true or false"});
  expect_refused(parse("{\"eos_token_id\":100}"), bad, {"eos_token_id", "100", "vocabulary"});
  expect_refused(parse("{\"eos_token_id\":\"</s>\"}"), bad, {"eos_token_id"});
  expect_refused(parse("[1]"), bad, {"generation_config.json", "object"});
  const TempFolder folder;
  std::filesystem::create_symlink("gone", folder.path() / "generation_config.json");
  expect_refused(load_generation_config(folder.path(), small_model()), bad,
                 {"generation_config.json", "target does not exist"});
}

}  // namespace
}  // namespace clo
