// Tokenizers from GGUF metadata against the same tokenizers from tokenizer.json.
#include "text/gguf_tokenizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>

#include "gguf_writer.h"
#include "text/tokenizer.h"

namespace clo {
namespace {

using Json = nlohmann::json;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The metadata that a converter makes of a tokenizer.json.
struct Metadata {
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> types;
  std::string pre;
  int32_t bos = -1;
  int add_bos = -1;  // -1: not said
  std::string kind = "gpt2";

  Metadata(const Json& source, std::string pattern) : pre(std::move(pattern)) {
    std::map<int32_t, std::pair<std::string, int32_t>> by_id;
    for (const auto& [token, id] : source["model"]["vocab"].items()) by_id[id] = {token, 1};
    for (const Json& added : source["added_tokens"]) {
      by_id[added["id"]] = {added["content"], added["special"].get<bool>() ? 3 : 4};
    }
    for (const auto& [id, token] : by_id) {
      while (std::ssize(tokens) < id) {
        types.push_back(5);
        tokens.push_back("[unused" + std::to_string(tokens.size()) + "]");
      }
      tokens.push_back(token.first);
      types.push_back(token.second);
    }
    for (const Json& merge : source["model"]["merges"]) {
      merges.push_back(merge.is_string()
                           ? merge.get<std::string>()
                           : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
    }
  }

  std::string bytes() const {
    GgufWriter values;
    values.bytes.clear();
    uint64_t count = 5;
    values.words("tokenizer.ggml.model", kind).words("tokenizer.ggml.pre", pre);
    values.texts("tokenizer.ggml.tokens", tokens).texts("tokenizer.ggml.merges", merges);
    values.integers("tokenizer.ggml.token_type", types);
    if (bos >= 0) {
      values.integer("tokenizer.ggml.bos_token_id", static_cast<uint32_t>(bos));
      ++count;
    }
    if (add_bos >= 0) {
      values.flag("tokenizer.ggml.add_bos_token", add_bos == 1);
      ++count;
    }
    GgufWriter file;
    file.head(0, count);
    return file.bytes + values.bytes;
  }
  Result<Tokenizer> tokenizer() const {
    const std::string all = bytes();
    auto file = GgufFile::parse(std::as_bytes(std::span(all.data(), all.size())), "test.gguf");
    if (!file) return std::move(file).error();
    return Tokenizer::from_gguf(*file);
  }
};

Json golden(const std::string& name) {
  return Json::parse(text_of(CLO_SOURCE_DIR "/tests/golden/text/tokenizer_" + name + ".json"));
}

TEST(GgufTokenizer, GivesTheIdsOfTheSameTokenizerJson) {
  const Json cases = Json::parse(text_of(CLO_SOURCE_DIR "/tests/golden/text/token_cases.json"));
  for (const auto& [name, pre] : {std::pair{"llama3", "llama-bpe"}, std::pair{"qwen2", "qwen2"},
                                  std::pair{"gpt2", "gpt-2"}}) {
    const Json source = golden(name);
    const auto expected = Tokenizer::parse(source.dump(), name);
    ASSERT_TRUE(expected) << expected.error().to_string();
    const auto found = Metadata(source, pre).tokenizer();
    ASSERT_TRUE(found) << found.error().to_string();
    EXPECT_EQ(found->vocab_size(), expected->vocab_size());
    std::vector<std::string> texts = {"", "Hello  world\n\n 12345 it's",
                                      "naïve 漢字 🙂 \r\n\t x"};
    texts.push_back(text_of(CLO_SOURCE_DIR "/README.md"));
    for (const Json& text : cases["texts"]) texts.push_back(text);
    for (const std::string& text : texts) {
      const auto a = found->encode(text, {false, true}), b = expected->encode(text, {false, true});
      ASSERT_EQ(a.has_value(), b.has_value());
      if (!a) continue;
      EXPECT_EQ(*a, *b) << name << ": " << text.substr(0, 80);
    }
    for (int32_t id = 0; id < found->vocab_size(); ++id) {
      ASSERT_EQ(found->decode_bytes(id), expected->decode_bytes(id)) << id;
      ASSERT_EQ(found->is_special(id), expected->is_special(id)) << id;
    }
  }
}

TEST(GgufTokenizer, BeginsWhereTheFileOrThePatternSaysSo) {
  const Json source = golden("llama3");
  const int32_t bos = source["added_tokens"][0]["id"];
  Metadata metadata(source, "llama-bpe");
  metadata.bos = bos;
  const EncodeOptions whole{true, true};
  EXPECT_EQ(metadata.tokenizer()->encode("a", whole)->front(), bos);
  metadata.add_bos = 0;
  EXPECT_NE(metadata.tokenizer()->encode("a", whole)->front(), bos);
  metadata.pre = "gpt-2";
  metadata.add_bos = 1;
  EXPECT_EQ(metadata.tokenizer()->encode("a", whole)->front(), bos);
  metadata.add_bos = -1;
  EXPECT_NE(metadata.tokenizer()->encode("a", whole)->front(), bos);
}

// Digits one by one, and what lies between them as GPT-2 splits it by itself.
TEST(GgufTokenizer, SmolLmSplitsDigitsFirst) {
  const auto tokenizer = Metadata(golden("gpt2"), "smollm").tokenizer();
  ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
  const auto gpt2 = Metadata(golden("gpt2"), "gpt-2").tokenizer();
  for (const std::vector<std::string>& pieces : {std::vector<std::string>{"a", "1", "2", "b"},
                                                 {"a ", "7"},
                                                 {"x  ", "4", "2", "  y"},
                                                 {"\n\n ", "0"},
                                                 {"don't ", "9", "!"},
                                                 {"  "},
                                                 {"1", " ", "2"}}) {
    std::string text;
    std::vector<TokenId> expected;
    for (const std::string& piece : pieces) {
      text += piece;
      const std::vector<TokenId> ids = gpt2->encode(piece).value();
      expected.insert(expected.end(), ids.begin(), ids.end());
    }
    EXPECT_EQ(tokenizer->encode(text).value(), expected) << text;
  }
}

TEST(GgufTokenizer, RefusesByName) {
  const Json source = golden("gpt2");
  const auto refused = [](const Metadata& metadata, const std::string& words, ErrorCode code) {
    const auto tokenizer = metadata.tokenizer();
    ASSERT_FALSE(tokenizer) << words;
    EXPECT_EQ(tokenizer.error().code, code);
    EXPECT_NE(tokenizer.error().message.find(words), std::string::npos)
        << tokenizer.error().message;
  };
  Metadata other(source, "deepseek-llm");
  refused(other, "\"deepseek-llm\"; known split patterns are llama-bpe", ErrorCode::kUnsupported);
  Metadata kind(source, "gpt-2");
  kind.kind = "bert";
  refused(kind, "\"bert\"; supported are gpt2 (byte-level BPE) and llama", ErrorCode::kUnsupported);
  Metadata types(source, "gpt-2");
  types.types.pop_back();
  refused(types, "token types", ErrorCode::kBadFile);
  Metadata merge(source, "gpt-2");
  merge.merges[1] = "alone";
  refused(merge, "merge 1 of the tokenizer is no pair", ErrorCode::kBadFile);
  Metadata bos(source, "gpt-2");
  bos.bos = 1 << 20;
  refused(bos, "\"tokenizer.ggml.bos_token_id\" is 1048576", ErrorCode::kBadFile);
  Metadata bytes(source, "gpt-2");
  bytes.tokens[40] = "\xFF\xFE";
  refused(bytes, "not UTF-8", ErrorCode::kBadFile);
}

// A vocabulary with scores: right as it is, wrong in one thing each.
struct Pieces {
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "<tool>", "a", "b", "ab"};
  std::vector<float> scores = {0, 0, 0, 0, -2, -3, -1};
  std::vector<int32_t> types = {2, 3, 3, 4, 1, 1, 1};
  int64_t bos = 1, unknown = -1;  // -1: not said
  std::function<void(GgufWriter&)> more;

  Result<Tokenizer> tokenizer() const {
    GgufWriter values;
    values.bytes.clear();
    uint64_t count = 3;
    values.words("tokenizer.ggml.model", "llama").texts("tokenizer.ggml.tokens", tokens);
    values.integers("tokenizer.ggml.token_type", types);
    if (!scores.empty()) {
      values.numbers("tokenizer.ggml.scores", scores);
      ++count;
    }
    if (bos >= 0) {
      values.integer("tokenizer.ggml.bos_token_id", static_cast<uint32_t>(bos));
      ++count;
    }
    if (unknown >= 0) {
      values.integer("tokenizer.ggml.unknown_token_id", static_cast<uint32_t>(unknown));
      ++count;
    }
    if (more) {
      more(values);
      ++count;
    }
    GgufWriter whole;
    whole.head(0, count);
    whole.bytes += values.bytes;
    auto file = GgufFile::parse(std::as_bytes(std::span(whole.bytes.data(), whole.bytes.size())),
                                "test.gguf");
    if (!file) return std::move(file).error();
    return Tokenizer::from_gguf(*file);
  }
};

TEST(GgufPieces, AreReadAndRefusedByName) {
  const auto whole = Pieces{}.tokenizer();
  ASSERT_TRUE(whole) << whole.error().to_string();
  EXPECT_EQ(*whole->encode("ab<tool>zz", {true, true}), (std::vector<TokenId>{1, 0, 6, 3, 0}));

  const auto refused = [](const char* words, auto change, ErrorCode code = ErrorCode::kBadFile) {
    Pieces pieces;
    change(pieces);
    const auto tokenizer = pieces.tokenizer();
    ASSERT_FALSE(tokenizer) << words;
    EXPECT_EQ(tokenizer.error().code, code);
    EXPECT_EQ(tokenizer.error().where, "test.gguf");
    EXPECT_NE(tokenizer.error().message.find(words), std::string::npos)
        << tokenizer.error().message;
  };
  refused("\"tokenizer.ggml.scores\" is missing", [](Pieces& p) { p.scores.clear(); });
  refused("7 tokens, 6 scores and 7 token types", [](Pieces& p) { p.scores.pop_back(); });
  refused("7 tokens, 7 scores and 8 token types", [](Pieces& p) { p.types.push_back(1); });
  refused("\"tokenizer.ggml.tokens\" is empty", [](Pieces& p) {
    p.tokens.clear();
    p.types.clear();
    p.scores.clear();
    p.more = [](GgufWriter& values) { values.numbers("tokenizer.ggml.scores", {}); };
  });
  refused("token 4 of the tokenizer has 0 bytes", [](Pieces& p) { p.tokens[4] = ""; });
  refused("token 4 of the tokenizer has 1025 bytes",
          [](Pieces& p) { p.tokens[4] = std::string(1025, 'x'); });
  refused("token 4 of the tokenizer is not UTF-8", [](Pieces& p) { p.tokens[4] = "\xFF"; });
  refused("token 6 of the tokenizer has a score that is no number",
          [](Pieces& p) { p.scores[6] = std::nanf(""); });
  refused("token 5 of the tokenizer, \"a\", occurs twice", [](Pieces& p) { p.tokens[5] = "a"; });
  refused("token 6 of the tokenizer is of type 7", [](Pieces& p) { p.types[6] = 7; });
  refused("token 6 of the tokenizer is of type byte", [](Pieces& p) { p.types[6] = 6; });
  refused("tokens for 1 of the 256 bytes", [](Pieces& p) {
    p.types[6] = 6;
    p.tokens[6] = "<0x41>";
  });
  refused("found \"<0x4a>\"", [](Pieces& p) {
    p.types[5] = p.types[6] = 6;
    p.tokens[5] = "<0x4A>";
    p.tokens[6] = "<0x4a>";
  });
  refused("neither byte tokens nor an unknown token", [](Pieces& p) { p.types[0] = 3; });
  refused("\"tokenizer.ggml.unknown_token_id\" is 7", [](Pieces& p) { p.unknown = 7; });
  refused("\"tokenizer.ggml.bos_token_id\" is 7", [](Pieces& p) { p.bos = 7; });
  refused("\"tokenizer.ggml.bos_token_id\" is missing", [](Pieces& p) { p.bos = -1; });
  refused("\"tokenizer.ggml.eos_token_id\" is missing", [](Pieces& p) {
    p.more = [](GgufWriter& values) { values.flag("tokenizer.ggml.add_eos_token", true); };
  });
  refused("\"tokenizer.ggml.add_space_prefix\" is no truth value", [](Pieces& p) {
    p.more = [](GgufWriter& values) { values.integer("tokenizer.ggml.add_space_prefix", 1); };
  });
  refused(
      "\"tokenizer.ggml.remove_extra_whitespaces\" is true",
      [](Pieces& p) {
        p.more = [](GgufWriter& values) {
          values.flag("tokenizer.ggml.remove_extra_whitespaces", true);
        };
      },
      ErrorCode::kUnsupported);
  refused(
      "\"tokenizer.ggml.precompiled_charsmap\"",
      [](Pieces& p) {
        p.more = [](GgufWriter& values) {
          values.integers("tokenizer.ggml.precompiled_charsmap", {1});
        };
      },
      ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace clo
