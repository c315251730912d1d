// Every seed of the fuzzers as a plain test: valid_* are accepted, bad_* refused, the rest (inputs
// that a fuzzer once found) only must not crash.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "io/generation_config.h"
#include "io/model_config.h"
#include "io/safetensors.h"
#include "temp_files.h"

namespace clo {
namespace {

namespace fs = std::filesystem;

// Calls `read` with each file's content; `read` says whether it was accepted.
template <typename Read>
void run_corpus(const std::string& target, const Read& read) {
  int num_files = 0;
  std::error_code fault;
  for (const auto& entry :
       fs::directory_iterator(fs::path(CLO_SOURCE_DIR "/tests/fuzz/corpus") / target, fault)) {
    std::ifstream file(entry.path(), std::ios::binary);
    std::stringstream content;
    content << file.rdbuf();
    const std::string name = entry.path().filename().string();
    const bool is_accepted = read(content.str());
    if (name.starts_with("valid_")) {
      EXPECT_TRUE(is_accepted) << name;
    }
    if (name.starts_with("bad_")) {
      EXPECT_FALSE(is_accepted) << name;
    }
    ++num_files;
  }
  EXPECT_GE(num_files, 5) << target << " " << fault.message();
}

TEST(Corpus, Safetensors) {
  run_corpus("safetensors", [](const std::string& content) {
    return SafetensorsFile::parse(as_bytes(content), "corpus").has_value();
  });
}

TEST(Corpus, Config) {
  run_corpus("config", [](const std::string& content) {
    ModelConfig small;
    small.vocab_size = 128;
    static_cast<void>(parse_generation_config(content, "corpus", small));
    const auto config = parse_model_config(content, "corpus");
    if (config) {
      const auto found = rope_inverse_frequencies(config->rope, config->head_dim);
      EXPECT_EQ(found.size(), static_cast<size_t>(config->head_dim / 2));
    }
    return config.has_value();
  });
}

}  // namespace
}  // namespace clo
