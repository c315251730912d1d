#pragma once
// Reads the files of tests/golden/text for the tests of this room.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "base/try.h"
#include "io/gguf.h"
#include "text/tokenizer.h"

namespace clo {

inline std::filesystem::path source_dir() { return CLO_SOURCE_DIR; }
inline std::filesystem::path golden_dir() { return source_dir() / "tests" / "golden" / "text"; }

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline Tokenizer golden_tokenizer(const std::string& name) {
  auto tokenizer =
      name == "recall-7m"
          ? Tokenizer::load(source_dir() / "models" / name)
          : Tokenizer::parse(read_file(golden_dir() / ("tokenizer_" + name + ".json")), name);
  EXPECT_TRUE(tokenizer) << tokenizer.error().to_string();
  return std::move(tokenizer).value();
}

inline std::filesystem::path pieces_dir() { return golden_dir() / "pieces"; }

inline Tokenizer library_pieces(const std::string& name) {
  auto tokenizer = Tokenizer::parse(read_file(pieces_dir() / (name + ".json")), name);
  EXPECT_TRUE(tokenizer) << tokenizer.error().to_string();
  return std::move(tokenizer).value();
}

inline Result<Tokenizer> load_gguf(const std::filesystem::path& path) {
  CLO_ASSIGN(const ModelFiles model, ModelFiles::find(path));
  return Tokenizer::load(model);
}

inline Tokenizer scored_pieces(const std::string& name) {
  auto tokenizer = load_gguf(pieces_dir() / (name + ".gguf"));
  EXPECT_TRUE(tokenizer) << tokenizer.error().to_string();
  return std::move(tokenizer).value();
}

inline constexpr const char* kLibraryPieces[] = {"prepend", "normalized", "first",
                                                 "always",  "never",      "dropped"};
inline constexpr const char* kScoredPieces[] = {"llama", "ties"};
inline constexpr const char* kGoldenTokenizers[] = {"gpt2", "llama3", "qwen2", "flags",
                                                    "recall-7m"};

}  // namespace clo
