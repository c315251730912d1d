// The seeds of the fuzzers of tokenizers as plain tests: valid_* and pieces_* are accepted, bad_*
// refused.
#include "golden_files.h"

namespace clo {
namespace {

namespace fs = std::filesystem;

const fs::path kCorpus = CLO_SOURCE_DIR "/tests/fuzz/corpus";

TEST(Corpus, GgufTokenizers) {
  int num_files = 0;
  for (const auto& entry : fs::directory_iterator(kCorpus / "gguf_tokenizer")) {
    const auto tokenizer = load_gguf(entry.path());
    const std::string name = entry.path().filename().string();
    if (name.starts_with("valid_")) {
      EXPECT_TRUE(tokenizer) << name << ": " << tokenizer.error().to_string();
    }
    if (name.starts_with("bad_")) {
      EXPECT_FALSE(tokenizer) << name;
    }
    ++num_files;
  }
  EXPECT_GE(num_files, 5);
}

TEST(Corpus, TokenizersOfPieces) {
  int num_files = 0;
  for (const auto& entry : fs::directory_iterator(kCorpus / "tokenizer")) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("pieces_")) continue;
    const std::string content = read_file(entry.path());
    const size_t end = content.find('\0');
    const auto tokenizer = Tokenizer::parse(content.substr(0, end), name);
    ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
    EXPECT_TRUE(tokenizer->encode(content.substr(end + 1))) << name;
    ++num_files;
  }
  EXPECT_GE(num_files, 3);
}

}  // namespace
}  // namespace clo
