// Mistral: Llama's arithmetic without a sliding window, and with one as long as the context stays
// within it. The weights are those of the tiny Llama model, whose logits are compared with
// transformers' elsewhere.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "loaded_engine.h"

namespace clo {
namespace {

namespace fs = std::filesystem;

// A folder of its own with the weights of llama3 under a Mistral config.
class Mistral : public testing::Test {
 protected:
  Mistral() {
    fs::remove_all(dir_);
    fs::create_directories(dir_);
    for (const char* name : {"model.safetensors", "generation_config.json"}) {
      fs::copy_file(source_ / name, dir_ / name);
    }
  }
  ~Mistral() override { fs::remove_all(dir_); }

  void write_config(const nlohmann::json& window) const {
    std::ifstream file(source_ / "config.json");
    auto config = nlohmann::json::parse(file);
    config["architectures"] = {"MistralForCausalLM"};
    config["model_type"] = "mistral";
    config["sliding_window"] = window;
    config.erase("attention_bias");
    config.erase("mlp_bias");
    std::ofstream(dir_ / "config.json") << config;
  }

  EngineOptions options(const fs::path& dir, int64_t context) const {
    EngineOptions made = tiny_options("llama3");
    made.model_dir = dir.string();
    made.dtype = WeightType::kF32;
    made.max_context_tokens = context;
    return made;
  }

  static std::vector<std::vector<float>> logits(const EngineOptions& options) {
    std::vector<std::vector<float>> out;
    const auto engine = load_engine(options);
    if (!engine) return out;
    Request request = ids_request(random_ids(200, 128, 5), 24, *preset("dense"));
    request.on_logits = [&](std::span<const float> row) {
      out.emplace_back(row.begin(), row.end());
    };
    answer_of(*engine, std::move(request));
    return out;
  }

  const fs::path source_ = CLO_SOURCE_DIR "/tests/golden/models/llama3";
  const fs::path dir_ = fs::path(testing::TempDir()) / "clo_mistral";
};

TEST_F(Mistral, HasTheLogitsOfLlama) {
  write_config(nullptr);
  const auto found = logits(options(dir_, 0));
  EXPECT_EQ(found.size(), 24u);
  EXPECT_EQ(found, logits(options(source_, 0)));
}

TEST_F(Mistral, HasTheLogitsOfLlamaWithinItsWindow) {
  write_config(256);
  const auto found = logits(options(dir_, 256));
  EXPECT_EQ(found.size(), 24u);
  EXPECT_EQ(found, logits(options(source_, 256)));
}

TEST_F(Mistral, IsRefusedBeyondItsWindow) {
  write_config(256);
  for (const int64_t context : {0, 257, 2048}) {
    const auto engine = Engine::load(options(dir_, context));
    ASSERT_FALSE(engine);
    EXPECT_EQ(engine.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(engine.error().where, "--context");
    for (const std::string words : {"sliding_window is 256", "--context 256 or less"}) {
      EXPECT_NE(engine.error().message.find(words), std::string::npos) << engine.error().message;
    }
  }
  const auto beyond = Engine::load(options(dir_, 2049));
  ASSERT_FALSE(beyond);
  EXPECT_EQ(beyond.error().code, ErrorCode::kBadFlag);
}

TEST_F(Mistral, NeverGrowsOutOfItsWindow) {
  write_config(256);
  const auto engine = load_engine(options(dir_, 256));
  ASSERT_NE(engine, nullptr);
  EXPECT_FALSE(engine->generate(ids_request(random_ids(256, 128, 5), 1, *preset("dense"))));
  const Response answer =
      answer_of(*engine, ids_request(random_ids(200, 128, 5), 500, *preset("dense")));
  EXPECT_EQ(200 + std::ssize(answer.tokens), 256);
}

}  // namespace
}  // namespace clo
