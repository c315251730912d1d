// Every way in which a tokenizer.json can be wrong or beyond us, by code and named culprit.
#include <functional>
#include <span>

#include "golden_files.h"

namespace clo {
namespace {

using Json = nlohmann::json;

struct Refusal {
  const char* named;  // what the message must say
  ErrorCode code;
  std::function<void(Json&)> change;
};

constexpr auto kBadFile = ErrorCode::kBadFile;
constexpr auto kUnsupported = ErrorCode::kUnsupported;

void set_pattern(Json& j, const char* pattern) {
  j["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", pattern}};
}

const Refusal kRefusals[] = {
    {"\"WordPiece\"", kUnsupported, [](Json& j) { j["model"]["type"] = "WordPiece"; }},
    {"\"Unigram\"", kUnsupported, [](Json& j) { j["model"]["type"] = "Unigram"; }},
    {"\"WordLevel\"", kUnsupported, [](Json& j) { j["model"]["type"] = "WordLevel"; }},
    {"no \"model\"", kBadFile, [](Json& j) { j.erase("model"); }},
    {"dropout 0.1", kUnsupported, [](Json& j) { j["model"]["dropout"] = 0.1; }},
    {"continuing_subword_prefix \"##\"", kUnsupported,
     [](Json& j) { j["model"]["continuing_subword_prefix"] = "##"; }},
    {"end_of_word_suffix \"</w>\"", kUnsupported,
     [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }},
    {"ignore_merges", kBadFile, [](Json& j) { j["model"]["ignore_merges"] = 1; }},
    {"model.vocab", kBadFile, [](Json& j) { j["model"]["vocab"] = Json::array(); }},
    {"without a token for byte 0 (unk_token \"<unk>\")", kUnsupported,
     [](Json& j) {
       j["model"]["vocab"].erase("Ā");
       j["model"]["unk_token"] = "<unk>";
     }},
    {"the id of token \"!\"", kBadFile, [](Json& j) { j["model"]["vocab"]["!"] = -1; }},
    {"found 16777216", kBadFile, [](Json& j) { j["model"]["vocab"]["!"] = 1 << 24; }},
    {"found 1.5", kBadFile, [](Json& j) { j["model"]["vocab"]["!"] = 1.5; }},
    {"largest token id is 16000000", kBadFile,
     [](Json& j) { j["model"]["vocab"]["!"] = 16'000'000; }},
    {"given to two tokens", kBadFile, [](Json& j) { j["model"]["vocab"]["!"] = 50; }},
    {"model.merges", kBadFile, [](Json& j) { j["model"].erase("merges"); }},
    {"model.merges[0] \"ab\"", kBadFile, [](Json& j) { j["model"]["merges"][0] = "ab"; }},
    {"model.merges[0] \"a b c\"", kBadFile, [](Json& j) { j["model"]["merges"][0] = "a b c"; }},
    {"model.merges[1] 7", kBadFile, [](Json& j) { j["model"]["merges"][1] = 7; }},
    {"not in model.vocab", kBadFile, [](Json& j) { j["model"]["merges"][0] = "qqq zzz"; }},
    {"model.merges[1]", kBadFile,
     [](Json& j) { j["model"]["merges"][1] = j["model"]["merges"][0]; }},
    {"added_tokens", kBadFile, [](Json& j) { j["added_tokens"] = 1; }},
    {"\"content\"", kBadFile, [](Json& j) { j["added_tokens"][0]["content"] = ""; }},
    {"\"lstrip\"", kBadFile, [](Json& j) { j["added_tokens"][0]["lstrip"] = "yes"; }},
    {"<|im_start|>", kBadFile, [](Json& j) { j["added_tokens"][1]["id"] = 0; }},
    {"<|im_end|>", kBadFile, [](Json& j) { j["added_tokens"][2]["id"] = 5000; }},
    {"\"Lowercase\"", kUnsupported,
     [](Json& j) {
       j["normalizer"] = {{"type", "Lowercase"}};
     }},
    {"normalizer: expected an object", kBadFile, [](Json& j) { j["normalizer"] = "NFC"; }},
    {"\"normalizers\"", kBadFile,
     [](Json& j) {
       j["normalizer"] = {{"type", "Sequence"}};
     }},
    {"nested deeper", kUnsupported,
     [](Json& j) {
       Json nested = {{"type", "NFC"}};
       for (int i = 0; i < 50; ++i)
         nested = {{"type", "Sequence"}, {"normalizers", Json::array({nested})}};
       j["normalizer"] = nested;
     }},
    {"\"BertPreTokenizer\"", kUnsupported,
     [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["type"] = "BertPreTokenizer"; }},
    {"\"ByteLevel\" without a ByteLevel pre-tokenizer", kUnsupported,
     [](Json& j) { j["pre_tokenizer"] = nullptr; }},
    {"\"Digits\" after ByteLevel", kUnsupported,
     [](Json& j) {
       j["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}});
     }},
    {"behavior \"Removed\"", kUnsupported,
     [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"; }},
    {"a Split pattern", kBadFile,
     [](Json& j) { j["pre_tokenizer"]["pretokenizers"][0]["pattern"] = "x"; }},
    {"\"\\w\" at byte 0", kUnsupported, [](Json& j) { set_pattern(j, "\\w+"); }},
    {"\"&&\"", kUnsupported, [](Json& j) { set_pattern(j, "[a-z&&[x]]"); }},
    {"\"[ inside [...]\"", kUnsupported, [](Json& j) { set_pattern(j, "[a[b]]"); }},
    {"\"(*\"", kUnsupported, [](Json& j) { set_pattern(j, "(*UTF)a"); }},
    {"\"(?m)\"", kUnsupported, [](Json& j) { set_pattern(j, "(?m)a"); }},
    {"\"}+\"", kUnsupported, [](Json& j) { set_pattern(j, "a{1,3}+"); }},
    {"does not compile", kBadFile, [](Json& j) { set_pattern(j, "(a"); }},
    {"does not compile", kBadFile, [](Json& j) { set_pattern(j, "\\p{Nonsense}"); }},
    {"\"BertProcessing\"", kUnsupported,
     [](Json& j) {
       j["post_processor"] = {{"type", "BertProcessing"}};
     }},
    {"\"single\"", kBadFile,
     [](Json& j) {
       j["post_processor"] = {{"type", "TemplateProcessing"}};
     }},
    {"no ids for \"<s>\"", kBadFile,
     [](Json& j) {
       j["post_processor"] = Json::parse(R"({"type":"TemplateProcessing","single":[
         {"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],"special_tokens":{}})");
     }},
    {"id 9999 of \"<s>\"", kBadFile,
     [](Json& j) {
       j["post_processor"] = Json::parse(R"({"type":"TemplateProcessing","single":[
         {"SpecialToken":{"id":"<s>"}},{"Sequence":{"id":"A"}}],
         "special_tokens":{"<s>":{"ids":[9999]}}})");
     }},
    {"\"WordPiece\"", kUnsupported,
     [](Json& j) {
       j["decoder"] = {{"type", "WordPiece"}};
     }},
    {"a decoder that has no ByteLevel", kUnsupported, [](Json& j) { j["decoder"] = nullptr; }},
};

// The same for tokenizers without bytes of their own.
const Refusal kPieceRefusals[] = {
    {"\"Unigram\"", kUnsupported, [](Json& j) { j["model"]["type"] = "Unigram"; }},
    {"byte_fallback", kBadFile, [](Json& j) { j["model"]["byte_fallback"] = "yes"; }},
    {"fuse_unk", kBadFile, [](Json& j) { j["model"]["fuse_unk"] = 1; }},
    {"unk_token", kBadFile, [](Json& j) { j["model"]["unk_token"] = "<none>"; }},
    {"unk_token", kBadFile, [](Json& j) { j["model"]["unk_token"] = 0; }},
    {"byte_fallback without a token \"<0x41>\"", kUnsupported,
     [](Json& j) { j["model"]["vocab"].erase("<0x41>"); }},
    {"\"Lowercase\"", kUnsupported,
     [](Json& j) {
       j["normalizer"]["normalizers"].push_back({{"type", "Lowercase"}});
     }},
    {"\"Precompiled\"", kUnsupported,
     [](Json& j) {
       j["normalizer"] = {{"type", "Precompiled"}, {"precompiled_charsmap", "AAAA"}};
     }},
    {"\"prepend\"", kBadFile, [](Json& j) { j["normalizer"]["normalizers"][0].erase("prepend"); }},
    {"\"content\"", kBadFile, [](Json& j) { j["normalizer"]["normalizers"][1]["content"] = ""; }},
    {"\"String\"", kBadFile,
     [](Json& j) {
       j["normalizer"]["normalizers"][1]["pattern"] = {{"String", ""}};
     }},
    {"a Replace normalizer with a regular expression", kUnsupported,
     [](Json& j) {
       j["normalizer"]["normalizers"][1]["pattern"] = {{"Regex", " "}};
     }},
    {"\"replacement\"", kBadFile,
     [](Json& j) {
       j["pre_tokenizer"] = {{"type", "Metaspace"}};
     }},
    {"one character", kBadFile,
     [](Json& j) {
       j["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "__"}};
     }},
    {"\"prepend_scheme\" must be \"always\", \"first\" or \"never\", found \"last\"", kBadFile,
     [](Json& j) {
       j["pre_tokenizer"] = {
           {"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "last"}};
     }},
    {"\"add_prefix_space\" is false", kBadFile,
     [](Json& j) {
       j["pre_tokenizer"] = {
           {"type", "Metaspace"}, {"replacement", "_"}, {"add_prefix_space", false}};
     }},
    {"\"Digits\" after Metaspace", kUnsupported,
     [](Json& j) {
       const Json metaspace = {{"type", "Metaspace"}, {"replacement", "_"}};
       j["pre_tokenizer"] = {{"type", "Sequence"},
                             {"pretokenizers", {metaspace, {{"type", "Digits"}}}}};
     }},
    {"without a decoder", kUnsupported, [](Json& j) { j["decoder"] = nullptr; }},
    {"\"Metaspace\" without a ByteLevel pre-tokenizer", kUnsupported,
     [](Json& j) {
       j["decoder"] = {{"type", "Metaspace"}, {"replacement", "_"}};
     }},
    {"\"Replace\" after ByteFallback", kUnsupported,
     [](Json& j) { std::swap(j["decoder"]["decoders"][0], j["decoder"]["decoders"][1]); }},
    {"\"ByteFallback\" after Fuse", kUnsupported,
     [](Json& j) { std::swap(j["decoder"]["decoders"][1], j["decoder"]["decoders"][2]); }},
    {"a Strip decoder before Fuse", kUnsupported,
     [](Json& j) { std::swap(j["decoder"]["decoders"][2], j["decoder"]["decoders"][3]); }},
    {"a second Strip", kUnsupported,
     [](Json& j) { j["decoder"]["decoders"].push_back(j["decoder"]["decoders"][3]); }},
    {"content \"x\"", kUnsupported, [](Json& j) { j["decoder"]["decoders"][3]["content"] = "x"; }},
    {"\"start\"", kBadFile, [](Json& j) { j["decoder"]["decoders"][3]["start"] = -1; }},
    {"\"stop\" 1", kUnsupported, [](Json& j) { j["decoder"]["decoders"][3]["stop"] = 1; }},
    {"a Replace decoder with a regular expression", kUnsupported,
     [](Json& j) {
       j["decoder"]["decoders"][0]["pattern"] = {{"Regex", "x"}};
     }},
};

void expect_refusals(const std::filesystem::path& file, std::span<const Refusal> refusals) {
  const Json whole = Json::parse(read_file(file));
  ASSERT_TRUE(Tokenizer::parse(whole.dump(), "here"));
  for (const Refusal& refusal : refusals) {
    Json changed = whole;
    refusal.change(changed);
    const auto made = Tokenizer::parse(changed.dump(), "here");
    ASSERT_FALSE(made) << refusal.named;
    EXPECT_EQ(made.error().code, refusal.code) << made.error().to_string();
    EXPECT_NE(made.error().message.find(refusal.named), std::string::npos)
        << "no " << refusal.named << " in: " << made.error().to_string();
    EXPECT_EQ(made.error().where, "here");
  }
}

TEST(TokenizerRefusals, NameTheCulprit) {
  expect_refusals(golden_dir() / "tokenizer_qwen2.json", kRefusals);
}

TEST(TokenizerRefusals, NameTheCulpritOfPieces) {
  expect_refusals(pieces_dir() / "prepend.json", kPieceRefusals);
}

TEST(TokenizerRefusals, TextThatIsNotJsonIsExplained) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "it is empty"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"},
      {"  <html><body>404</body></html>", "HTML page"},
      {"{\"model\":", "not valid JSON"},
      {"[]", "no \"model\""},
      {"\xFF\xFE", "not valid JSON"},
  };
  for (const auto& [text, named] : cases) {
    const auto made = Tokenizer::parse(text, "tokenizer.json");
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, kBadFile);
    EXPECT_NE(made.error().message.find(named), std::string::npos) << made.error().to_string();
  }
}

TEST(TokenizerRefusals, EveryTruncationIsAnErrorAndNoCrash) {
  const std::string whole = read_file(golden_dir() / "tokenizer_flags.json");
  for (size_t length = 0; length < whole.size(); length += 97)
    EXPECT_FALSE(Tokenizer::parse(std::string_view(whole).substr(0, length), "cut"));
}

TEST(TokenizerRefusals, DirectoriesWithoutATokenizerAreNamed) {
  const auto dir = std::filesystem::path(testing::TempDir()) / "clo_no_tokenizer";
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  const auto missing = Tokenizer::load(dir);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, kBadFile);
  EXPECT_NE(missing.error().where.find("tokenizer.json"), std::string::npos);
  std::ofstream(dir / "tokenizer.model") << "x";
  const auto sentencepiece = Tokenizer::load(dir);
  ASSERT_FALSE(sentencepiece);
  EXPECT_EQ(sentencepiece.error().code, kUnsupported);
  EXPECT_NE(sentencepiece.error().message.find("SentencePiece"), std::string::npos);
  std::filesystem::create_directories(dir / "tokenizer.json");
  const auto directory = Tokenizer::load(dir);
  ASSERT_FALSE(directory);
  EXPECT_NE(directory.error().message.find("expected a file"), std::string::npos);
}

// A pattern that backtracks without end must stop with an Error.
TEST(TokenizerRefusals, RunawayPatternsStop) {
  Json changed = Json::parse(read_file(golden_dir() / "tokenizer_qwen2.json"));
  set_pattern(changed, "(?:(?:a|b|ab)+)+[cd]");
  const auto made = Tokenizer::parse(changed.dump(), "here");
  ASSERT_TRUE(made) << made.error().to_string();
  std::string text;
  for (int i = 0; i < 2000; ++i) text += "ab";
  const auto ids = made->encode(text);
  ASSERT_FALSE(ids);
  EXPECT_EQ(ids.error().code, ErrorCode::kBadRequest);
  EXPECT_NE(ids.error().message.find("limit"), std::string::npos) << ids.error().message;
}

}  // namespace
}  // namespace clo
