// Every seed of the fuzzers as a plain test: valid_* are accepted, bad_* refused, the rest (inputs
// that a fuzzer once found) only must not crash.
#include <gtest/gtest.h>

#include "fuzz/run_corpus.h"
#include "io/generation_config.h"
#include "io/model_config.h"
#include "io/safetensors.h"
#include "temp_files.h"

namespace clo {
namespace {

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
