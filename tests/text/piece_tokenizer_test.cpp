// Tokenizers of the SentencePiece kind against Hugging Face tokenizers (tokenizer.json) and
// sentencepiece (GGUF metadata). Made by tests/golden/make_text_pieces.py.
#include <chrono>

#include "golden_files.h"
#include "io/gguf.h"
#include "text/stream_decoder.h"

namespace clo {
namespace {

using Ids = std::vector<TokenId>;
using Json = nlohmann::json;

const Json& cases() {
  static const Json all = Json::parse(read_file(pieces_dir() / "cases.json"));
  return all;
}

std::string streamed(const Tokenizer& tokenizer, const Ids& ids) {
  StreamDecoder stream(tokenizer);
  std::string text;
  for (const TokenId id : ids) text += stream.push(id);
  return text + stream.flush();
}

class LibraryPieces : public testing::TestWithParam<const char*> {
 protected:
  const Json& expected_ = cases()["library"][GetParam()];
  const Json& texts_ = cases()["texts"];
  Tokenizer tokenizer_ = library_pieces(GetParam());
};

TEST_P(LibraryPieces, GivesTheIdsOfHuggingFace) {
  ASSERT_GT(texts_.size(), 120u);
  for (size_t i = 0; i < texts_.size(); ++i) {
    const auto ids = tokenizer_.encode(texts_[i].get<std::string>());
    ASSERT_TRUE(ids) << ids.error().to_string();
    EXPECT_EQ(*ids, expected_["ids"][i].get<Ids>()) << i << ": " << texts_[i].dump();
  }
}

TEST_P(LibraryPieces, SpecialTokensStayTextWhenAsked) {
  for (size_t i = 0; i < texts_.size(); ++i) {
    const std::string key = std::to_string(i);
    const auto& literal = expected_["literal"];
    const auto& wanted = literal.contains(key) ? literal[key] : expected_["ids"][i];
    EXPECT_EQ(*tokenizer_.encode(texts_[i].get<std::string>(), {.parse_special = false}),
              wanted.get<Ids>())
        << i << ": " << texts_[i].dump();
  }
}

TEST_P(LibraryPieces, DecodesAsHuggingFace) {
  for (size_t i = 0; i < texts_.size(); ++i) {
    const auto ids = expected_["ids"][i].get<Ids>();
    const auto wanted = expected_["decoded"][i].get<std::string>();
    EXPECT_EQ(tokenizer_.decode(ids), wanted) << i;
    EXPECT_EQ(streamed(tokenizer_, ids), wanted) << i;
  }
  ASSERT_GT(expected_["sequences"].size(), 30u);
  for (const Json& sequence : expected_["sequences"]) {
    const auto ids = sequence[0].get<Ids>();
    EXPECT_EQ(tokenizer_.decode(ids), sequence[1].get<std::string>()) << sequence.dump();
    EXPECT_EQ(streamed(tokenizer_, ids), sequence[1].get<std::string>()) << sequence.dump();
  }
}

TEST_P(LibraryPieces, AddsSpecialTokensAsThePostProcessorSays) {
  EXPECT_EQ(*tokenizer_.encode("Hello", {.add_special_tokens = true}),
            expected_["hello"].get<Ids>());
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, LibraryPieces, testing::ValuesIn(kLibraryPieces),
                         [](const auto& tested) { return std::string(tested.param); });

class ScoredPieces : public testing::TestWithParam<const char*> {
 protected:
  const Json& expected_ = cases()["sentencepiece"][GetParam()];
  const Json& texts_ = cases()["texts"];
  Tokenizer tokenizer_ = scored_pieces(GetParam());
};

// sentencepiece finds no control tokens in text.
TEST_P(ScoredPieces, GivesTheIdsOfSentencePiece) {
  for (size_t i = 0; i < texts_.size(); ++i) {
    const auto ids = tokenizer_.encode(texts_[i].get<std::string>(), {.parse_special = false});
    ASSERT_TRUE(ids) << ids.error().to_string();
    EXPECT_EQ(*ids, expected_["ids"][i].get<Ids>()) << i << ": " << texts_[i].dump();
  }
}

TEST_P(ScoredPieces, DecodesAsSentencePiece) {
  for (size_t i = 0; i < texts_.size(); ++i) {
    const Json& wanted = expected_["decoded"][i];
    if (wanted.is_null()) continue;
    const auto ids = expected_["ids"][i].get<Ids>();
    EXPECT_EQ(tokenizer_.decode(ids), wanted.get<std::string>()) << i;
    EXPECT_EQ(streamed(tokenizer_, ids), wanted.get<std::string>()) << i;
  }
  for (const Json& sequence : expected_["sequences"]) {
    const auto ids = sequence[0].get<Ids>();
    EXPECT_EQ(tokenizer_.decode(ids), sequence[1].get<std::string>()) << sequence.dump();
    EXPECT_EQ(streamed(tokenizer_, ids), sequence[1].get<std::string>()) << sequence.dump();
  }
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, ScoredPieces, testing::ValuesIn(kScoredPieces),
                         [](const auto& tested) { return std::string(tested.param); });

TEST(ScoredPieces, BeginAndEndAsTheFileSays) {
  const EncodeOptions whole{.add_special_tokens = true};
  const Tokenizer llama = scored_pieces("llama"), ties = scored_pieces("ties");
  const TokenId bos = *llama.find("<s>");
  const Ids ids = *llama.encode("Hello", whole);
  EXPECT_EQ(ids.front(), bos);
  EXPECT_NE(ids.back(), *llama.find("</s>"));
  EXPECT_EQ(*llama.encode("<s>Hello", whole), ids);
  EXPECT_EQ(ties.encode("Hello", whole)->front(), *ties.find("<s>"));
  EXPECT_EQ(ties.encode("Hello", whole)->back(), *ties.find("</s>"));
}

// Each text between special tokens begins with a space of its own, as the whole text does.
TEST(ScoredPieces, FindSpecialTokensInText) {
  const Tokenizer tokenizer = scored_pieces("llama");
  const Ids text = *tokenizer.encode("copy"), other = *tokenizer.encode(" right");
  Ids wanted = {*tokenizer.find("[INST]")};
  wanted.insert(wanted.end(), text.begin(), text.end());
  wanted.push_back(*tokenizer.find("[/INST]"));
  wanted.insert(wanted.end(), other.begin(), other.end());
  wanted.push_back(*tokenizer.find("</s>"));
  EXPECT_EQ(*tokenizer.encode("[INST]copy[/INST] right</s>"), wanted);
  EXPECT_EQ(tokenizer.decode(wanted), "copy  right");
}

TEST(PieceStreams, ShowCharactersOfBytesAsSoonAsTheyAreWhole) {
  for (const Tokenizer& tokenizer : {library_pieces("prepend"), scored_pieces("llama")}) {
    const auto id = [&](const char* spelling) { return *tokenizer.find(spelling); };
    StreamDecoder stream(tokenizer);
    EXPECT_EQ(stream.push(id("\xE2\x96\x81the")), "the");
    EXPECT_EQ(stream.push(id("<0x0A>")), "\n");
    EXPECT_EQ(stream.push(id("<0xF0>")), "");
    EXPECT_EQ(stream.push(id("<0x9F>")), "");
    EXPECT_EQ(stream.push(id("<0x98>")), "");
    EXPECT_EQ(stream.push(id("<0x80>")), "\U0001F600");
    // A special token that is skipped does not break a character; text does, a mark for each byte.
    EXPECT_EQ(stream.push(id("<0xE2>")), "");
    EXPECT_EQ(stream.push(id("</s>")), "");
    EXPECT_EQ(stream.push(id("<0x98>")), "");
    EXPECT_EQ(stream.push(id("<0x83>")), "\u2603");
    EXPECT_EQ(stream.push(id("<0xE2>")), "");
    EXPECT_EQ(stream.push(id("<0x98>")), "");
    EXPECT_EQ(stream.push(id("\xE2\x96\x81the")), "\uFFFD\uFFFD the");
    EXPECT_EQ(stream.push(id("<0xC3>")), "");
    EXPECT_EQ(stream.flush(), "\uFFFD");
  }
}

TEST(PieceTokenizers, DescribeThemselvesInOneLine) {
  EXPECT_NE(
      library_pieces("first").description().find(
          "SentencePiece BPE, 593 tokens, byte fallback, Metaspace, 4 added, normaliser none"),
      std::string::npos)
      << library_pieces("first").description();
  EXPECT_NE(scored_pieces("llama").description().find(
                "SentencePiece BPE by scores, 643 tokens, byte fallback, 5 added, normaliser "
                "Prepend, Replace, post-processor add_bos_token <s>"),
            std::string::npos)
      << scored_pieces("llama").description();
}

// A document is one word here; the bounds catch a quadratic path on a loaded machine.
TEST(PieceTokenizers, LongTextsTakeLinearTime) {
  const Tokenizer tokenizers[] = {library_pieces("prepend"), library_pieces("first"),
                                  scored_pieces("llama")};
  std::string english;
  while (english.size() < 1'000'000) english += read_file(source_dir() / "LICENSE");
  for (const Tokenizer& tokenizer : tokenizers) {
    for (std::string unit : {english.c_str(), "a", " ", "\n", "ab", "\xC3\xA9", "\xE6\xBC\xA2"}) {
      std::string run = unit;
      while (run.size() < 1'000'000) run += unit;
      const auto start = std::chrono::steady_clock::now();
      EXPECT_TRUE(tokenizer.encode(run));
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      EXPECT_LT(taken.count(), 10) << unit.substr(0, 8);
    }
  }
}

}  // namespace
}  // namespace clo
