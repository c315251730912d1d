#include "text/tokenizer.h"

#include <chrono>
#include <random>

#include "base/utf8.h"
#include "golden_files.h"

namespace clo {
namespace {

using Ids = std::vector<TokenId>;

class TokenizerGolden : public testing::TestWithParam<const char*> {
 protected:
  TokenizerGolden()
      : cases_(nlohmann::json::parse(read_file(golden_dir() / "token_cases.json"))),
        expected_(cases_["tokenizers"][GetParam()]),
        tokenizer_(golden_tokenizer(GetParam())) {}
  nlohmann::json cases_, expected_;
  Tokenizer tokenizer_;
};

TEST_P(TokenizerGolden, GivesTheIdsOfHuggingFace) {
  const auto& texts = cases_["texts"];
  ASSERT_GT(texts.size(), 80u);
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto text = texts[i].get<std::string>();
    const auto ids = tokenizer_.encode(text);
    ASSERT_TRUE(ids) << ids.error().to_string();
    EXPECT_EQ(*ids, expected_["ids"][i].get<Ids>()) << i << ": " << texts[i].dump();
  }
}

TEST_P(TokenizerGolden, SpecialTokensStayTextWhenAsked) {
  const auto& texts = cases_["texts"];
  const auto& literal = expected_["literal"];
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string key = std::to_string(i);
    const auto ids = tokenizer_.encode(texts[i].get<std::string>(), {.parse_special = false});
    const auto& wanted = literal.contains(key) ? literal[key] : expected_["ids"][i];
    EXPECT_EQ(*ids, wanted.get<Ids>()) << i << ": " << texts[i].dump();
  }
}

TEST_P(TokenizerGolden, DecodesAsHuggingFace) {
  const auto& texts = cases_["texts"];
  const auto& decoded = expected_["decoded"];
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string key = std::to_string(i);
    const auto wanted = decoded.contains(key) ? decoded[key] : texts[i];
    EXPECT_EQ(tokenizer_.decode(expected_["ids"][i].get<Ids>()), wanted.get<std::string>()) << i;
  }
}

TEST_P(TokenizerGolden, AddsSpecialTokensAsThePostProcessorSays) {
  EXPECT_EQ(*tokenizer_.encode("Hello", {.add_special_tokens = true}),
            expected_["hello"].get<Ids>());
  EXPECT_EQ(tokenizer_.vocab_size(), expected_["vocab_size"].get<int>());
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, TokenizerGolden, testing::ValuesIn(kGoldenTokenizers),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::erase(name, '-');
                           return name;
                         });

std::string random_utf8(std::mt19937& random) {
  static constexpr char32_t kLimits[] = {0x80, 0x80, 0x300, 0x3000, 0x10000, 0x110000};
  std::string text;
  const size_t length = random() % 40;
  while (text.size() < length) {
    const char32_t c = random() % kLimits[random() % 6];
    if (c < 0xD800 || c > 0xDFFF) append_utf8(c, text);
  }
  return text;
}

TEST(Tokenizer, DecodingGivesBackEveryText) {
  std::mt19937 random(7);
  // "flags" and "qwen2" normalise, so they cannot.
  for (const char* name : {"gpt2", "llama3", "recall-7m"}) {
    const Tokenizer tokenizer = golden_tokenizer(name);
    for (int i = 0; i < 3000; ++i) {
      const std::string text = random_utf8(random);
      const auto ids = tokenizer.encode(text);
      ASSERT_TRUE(ids);
      ASSERT_EQ(tokenizer.decode(*ids, false), text);
    }
  }
}

TEST(Tokenizer, NeverAddsASecondBos) {
  const Tokenizer tokenizer = golden_tokenizer("llama3");
  const TokenId bos = *tokenizer.find("<|begin|>");
  const auto once = *tokenizer.encode("<|begin|>Hello", {.add_special_tokens = true});
  EXPECT_EQ(std::count(once.begin(), once.end(), bos), 1);
  EXPECT_EQ(once, *tokenizer.encode("Hello", {.add_special_tokens = true}));
  const auto none = *tokenizer.encode("Hello");
  EXPECT_EQ(std::count(none.begin(), none.end(), bos), 0);
  EXPECT_EQ(*tokenizer.encode("", {.add_special_tokens = true}), Ids{bos});
}

TEST(Tokenizer, HonoursAddBosTokenOnce) {
  const auto dir = std::filesystem::path(testing::TempDir()) / "clo_add_bos";
  std::filesystem::create_directories(dir);
  std::filesystem::copy_file(golden_dir() / "tokenizer_gpt2.json", dir / "tokenizer.json",
                             std::filesystem::copy_options::overwrite_existing);
  std::ofstream(dir / "tokenizer_config.json")
      << R"({"bos_token":{"content":"<|endoftext|>"},"add_bos_token":true})";
  auto tokenizer = Tokenizer::load(dir);
  ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
  const TokenId bos = *tokenizer->find("<|endoftext|>");
  EXPECT_EQ(tokenizer->encode("Hi", {.add_special_tokens = true})->front(), bos);
  EXPECT_EQ(*tokenizer->encode("<|endoftext|>Hi", {.add_special_tokens = true}),
            *tokenizer->encode("Hi", {.add_special_tokens = true}));

  std::ofstream(dir / "tokenizer_config.json") << R"({"bos_token":"<s>","add_bos_token":true})";
  const auto refused = Tokenizer::load(dir);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadFile);
  EXPECT_NE(refused.error().message.find("<s>"), std::string::npos);
}

TEST(Tokenizer, RecallPromptHasTheIdsOfTheModelCard) {
  const Tokenizer tokenizer = golden_tokenizer("recall-7m");
  EXPECT_EQ(*tokenizer.encode("<|endoftext|><|im_start|>user\n"), (Ids{0, 1, 3170, 201}));
  EXPECT_EQ(*tokenizer.encode("?<|im_end|>\n<|im_start|>assistant\n"),
            (Ids{33, 2, 201, 1, 373, 418, 440, 201}));
}

TEST(Tokenizer, RefusesInvalidUtf8WithTheByte) {
  const Tokenizer tokenizer = golden_tokenizer("gpt2");
  const auto ids = tokenizer.encode("good \xFF bad");
  ASSERT_FALSE(ids);
  EXPECT_EQ(ids.error().code, ErrorCode::kBadRequest);
  EXPECT_NE(ids.error().message.find("byte 5 (0xFF)"), std::string::npos) << ids.error().message;
}

TEST(Tokenizer, UnknownIdsAreHarmless) {
  const Tokenizer tokenizer = golden_tokenizer("gpt2");
  EXPECT_EQ(tokenizer.decode(Ids{-1, 1 << 30, tokenizer.vocab_size()}), "");
  EXPECT_FALSE(tokenizer.contains(-1));
  EXPECT_FALSE(tokenizer.is_special(1 << 30));
  EXPECT_FALSE(tokenizer.find("not a token"));
}

TEST(Tokenizer, DescribesItselfInOneLine) {
  const std::string line = golden_tokenizer("qwen2").description();
  EXPECT_NE(line.find("byte-level BPE, 700 tokens, split pattern Qwen2 ("), std::string::npos);
  EXPECT_NE(line.find("3 added, normaliser NFC, post-processor none"), std::string::npos) << line;
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

double encode_ms(const Tokenizer& tokenizer, const std::string& text) {
  const auto start = std::chrono::steady_clock::now();
  const auto ids = tokenizer.encode(text);
  EXPECT_TRUE(ids) << ids.error().to_string();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  return taken.count();
}

// Bounds are an order of magnitude above what a loaded machine needs: they catch a quadratic path.
TEST(Tokenizer, LongTextsTakeLinearTime) {
  const Tokenizer tokenizer = golden_tokenizer("recall-7m");
  std::string english;
  while (english.size() < 100'000) english += read_file(source_dir() / "LICENSE");
  english.resize(100'000);
  const double english_ms = encode_ms(tokenizer, english);
  EXPECT_LT(english_ms, 1500);
  RecordProperty("english_ms", std::to_string(english_ms));
  for (const char* unit : {"a", " ", "1", "\n", "!", "\xC3\xA9", "<|im_"}) {
    std::string run;
    while (run.size() < 1'000'000) run += unit;
    EXPECT_LT(encode_ms(tokenizer, run), 10'000) << unit;
  }
}

}  // namespace
}  // namespace clo
