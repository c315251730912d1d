#include "io/rope.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "io/model_config.h"
#include "io/safetensors.h"
#include "temp_files.h"

namespace clo {
namespace {

namespace fs = std::filesystem;

Result<ModelConfig> with_scaling(const std::string& scaling, const std::string& more = "") {
  return parse_model_config(
      R"({"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":80,
          "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":128,
          "max_position_embeddings":2048,"rope_scaling":)" +
          scaling + more + "}",
      "config.json");
}
RopeConfig rope_of(const std::string& scaling, const std::string& more = "") {
  const auto config = with_scaling(scaling, more);
  EXPECT_TRUE(config) << config.error().to_string();
  return config ? config->rope : RopeConfig{};
}

// Units in the last place between two positive floats.
int64_t ulps(float a, float b) {
  return std::abs(int64_t{std::bit_cast<int32_t>(a)} - int64_t{std::bit_cast<int32_t>(b)});
}

std::vector<float> floats(const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  convert_to_f32(view.type, view.bytes, values.data(), view.num_elements());
  return values;
}

// torch's vectorised pow may be off by one unit in the last place; blending adds at most two.
void expect_frequencies(const std::vector<float>& expected, const std::vector<float>& found,
                        const std::string& name) {
  ASSERT_EQ(expected.size(), found.size()) << name;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LE(ulps(expected[i], found[i]), 3)
        << name << " pair " << i << ": " << expected[i] << " and " << found[i];
  }
}

TEST(Rope, DefaultIsAPowerOfTheta) {
  RopeConfig rope;
  rope.theta = 500000;
  const std::vector<float> found = rope_inverse_frequencies(rope, 128);
  ASSERT_EQ(found.size(), 64u);
  EXPECT_EQ(found[0], 1.0f);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_NEAR(found[i] * std::pow(500000.0, static_cast<double>(i) / 64), 1, 2e-7);
  }
}

TEST(Rope, LinearDividesByTheFactor) {
  RopeConfig rope;
  const std::vector<float> plain = rope_inverse_frequencies(rope, 64);
  rope = rope_of(R"({"type":"linear","factor":8})");
  const std::vector<float> found = rope_inverse_frequencies(rope, 64);
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(found[i], plain[i] / 8);
}

TEST(Rope, Llama3KeepsShortAndStretchesLongWavelengths) {
  const RopeConfig rope =
      rope_of(R"({"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,
                  "original_max_position_embeddings":8192,"rope_theta":500000})");
  RopeConfig plain;
  plain.theta = 500000;
  const std::vector<float> before = rope_inverse_frequencies(plain, 128);
  const std::vector<float> found = rope_inverse_frequencies(rope, 128);
  int kept = 0, stretched = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const double wavelength = 2 * M_PI / before[i];
    if (wavelength < 8192 / 4) {
      EXPECT_EQ(found[i], before[i]);
      ++kept;
    } else if (wavelength > 8192) {
      EXPECT_EQ(found[i], before[i] / 8);
      ++stretched;
    } else {
      EXPECT_LT(found[i], before[i]);
      EXPECT_GT(found[i], before[i] / 8);
    }
  }
  EXPECT_EQ(kept, 29);
  EXPECT_EQ(stretched, 29);
}

TEST(Rope, YarnBlendsBetweenItsRotations) {
  const RopeConfig rope = rope_of(
      R"({"type":"yarn","factor":4,"original_max_position_embeddings":32768,"rope_theta":1e6})");
  RopeConfig plain;
  plain.theta = 1e6;
  const std::vector<float> before = rope_inverse_frequencies(plain, 128);
  const std::vector<float> found = rope_inverse_frequencies(rope, 128);
  // 64 ln(32768 / (32 * 2 pi)) / ln(1e6) = 23.6 and 64 ln(32768 / (2 pi)) / ln(1e6) = 39.7
  for (size_t i = 0; i <= 23; ++i) EXPECT_EQ(found[i], before[i]);
  for (size_t i = 24; i < 40; ++i) {
    EXPECT_LT(found[i], before[i]);
    EXPECT_GT(found[i], before[i] / 4);
  }
  for (size_t i = 40; i < 64; ++i) EXPECT_EQ(found[i], before[i] / 4);
}

TEST(Rope, YarnAttentionFactor) {
  const auto factor = [](const std::string& more) {
    return rope_of(R"({"type":"yarn","factor":40)" + more + "}").attention_factor;
  };
  EXPECT_DOUBLE_EQ(factor(""), 0.1 * std::log(40) + 1);
  EXPECT_DOUBLE_EQ(factor(R"(,"attention_factor":1.5,"mscale":2,"mscale_all_dim":1)"), 1.5);
  EXPECT_DOUBLE_EQ(factor(R"(,"mscale":1,"mscale_all_dim":0.5)"),
                   (0.1 * std::log(40) + 1) / (0.05 * std::log(40) + 1));
  EXPECT_DOUBLE_EQ(factor(R"(,"mscale":0.5)"), 0.1 * std::log(40) + 1);
  EXPECT_DOUBLE_EQ(factor(R"(,"mscale":0,"mscale_all_dim":0.5)"), 0.1 * std::log(40) + 1);
  EXPECT_DOUBLE_EQ(rope_of(R"({"type":"yarn","factor":1})").attention_factor, 1);
}

TEST(Rope, OriginalPositions) {
  const std::string yarn = R"({"type":"yarn","factor":2})";
  EXPECT_EQ(rope_of(yarn).original_max_positions, 2048);
  EXPECT_EQ(rope_of(yarn, R"(,"original_max_position_embeddings":512)").original_max_positions,
            512);
  EXPECT_EQ(rope_of(R"({"type":"yarn","factor":2,"original_max_position_embeddings":256})")
                .original_max_positions,
            256);
}

TEST(Rope, ThetaInsideWins) {
  EXPECT_EQ(
      rope_of(R"({"type":"linear","factor":2,"rope_theta":7000})", R"(,"rope_theta":9000)").theta,
      7000);
  EXPECT_EQ(rope_of(R"({"type":"linear","factor":2})", R"(,"rope_theta":9000)").theta, 9000);
  EXPECT_EQ(rope_of("{}", R"(,"rope_theta":9000)").theta, 9000);
  EXPECT_EQ(rope_of("null").theta, 10000);
}

TEST(Rope, RefusesTypesByName) {
  const auto code = ErrorCode::kUnsupported;
  expect_refused(with_scaling(R"({"type":"dynamic","factor":2})"), code,
                 {"rope_scaling.type", "dynamic", "stored", "yarn"});
  expect_refused(with_scaling(R"({"rope_type":"longrope","factor":2})"), code,
                 {"rope_scaling.rope_type", "longrope", "supported are"});
  expect_refused(with_scaling(R"({"rope_type":"su"})"), code, {"\"su\""});
  expect_refused(with_scaling(R"({"rope_type":"mrope","mrope_section":[1]})"), code, {"mrope"});
}

TEST(Rope, RefusesUnknownKeysByName) {
  const auto code = ErrorCode::kUnsupported;
  expect_refused(with_scaling(R"({"type":"yarn","factor":4,"alpha":1})"), code,
                 {"rope_scaling.alpha", "yarn"});
  expect_refused(with_scaling(R"({"type":"linear","factor":4,"beta_fast":32})"), code,
                 {"rope_scaling.beta_fast", "linear"});
  expect_refused(with_scaling(R"({"factor":4})"), code, {"rope_scaling.factor", "default"});
  expect_refused(with_scaling(R"({"full_attention":{"rope_type":"default"}})"), code,
                 {"rope_scaling.full_attention"});
  expect_refused(with_scaling(R"({"type":"linear","factor":2,"partial_rotary_factor":0.5})"), code,
                 {"rope_scaling.partial_rotary_factor", "0.5"});
  EXPECT_EQ(rope_of(R"({"type":"linear","factor":2,"beta_fast":null})").factor, 2);
}

TEST(Rope, RefusesBadValues) {
  const auto code = ErrorCode::kBadFile;
  expect_refused(with_scaling(R"({"type":"linear"})"), code, {"rope_scaling.factor", "missing"});
  expect_refused(with_scaling(R"({"type":"yarn"})"), code, {"rope_scaling.factor", "missing"});
  expect_refused(with_scaling(R"({"type":"linear","factor":"8"})"), code,
                 {"rope_scaling.factor", "number", "8"});
  expect_refused(with_scaling(R"({"type":"linear","factor":0})"), code, {"rope_scaling.factor"});
  expect_refused(with_scaling(R"({"type":"linear","factor":-4})"), code, {"rope_scaling.factor"});
  expect_refused(with_scaling(R"({"type":1,"factor":4})"), code, {"rope_scaling.type", "text"});
  expect_refused(with_scaling(R"({"type":"yarn","rope_type":"linear","factor":4})"), code,
                 {"rope_type", "linear", "yarn"});
  expect_refused(with_scaling("null", R"(,"rope_theta":0)"), code, {"rope_theta"});
  expect_refused(with_scaling("null", R"(,"rope_theta":-10000)"), code, {"rope_theta", "-10000"});
  expect_refused(with_scaling(R"({"rope_type":"llama3","factor":8,"low_freq_factor":1})"), code,
                 {"high_freq_factor", "missing"});
  expect_refused(with_scaling(R"({"rope_type":"llama3","factor":8,"low_freq_factor":4,
                                  "high_freq_factor":4})"),
                 code, {"high_freq_factor", "above low_freq_factor"});
  expect_refused(with_scaling(R"({"type":"yarn","factor":4,
                                  "original_max_position_embeddings":0})"),
                 code, {"rope_scaling.original_max_position_embeddings", "0"});
  expect_refused(with_scaling(R"({"type":"yarn","factor":4,
                                  "original_max_position_embeddings":"4096"})"),
                 code, {"original_max_position_embeddings", "integer"});
  expect_refused(with_scaling(R"({"type":"yarn","factor":4,"beta_fast":1,"beta_slow":2})"), code,
                 {"beta_fast", "beta_slow"});
  expect_refused(with_scaling(R"({"type":"yarn","factor":4,"truncate":"no"})"), code,
                 {"rope_scaling.truncate", "true or false"});
  expect_refused(with_scaling(R"({"type":"linear","factor":2})",
                              R"(,"rope_parameters":{"rope_type":"linear","factor":4})"),
                 code, {"rope_scaling", "rope_parameters", "disagree"});
  EXPECT_EQ(rope_of(R"({"type":"linear","factor":2})",
                    R"(,"rope_parameters":{"rope_type":"linear","factor":2})")
                .factor,
            2);
}

// Everything below is compared with what transformers computes; see tests/golden/make_models.py.
fs::path golden_folder() { return CLO_SOURCE_DIR "/tests/golden/models"; }

TEST(RopeGolden, PublishedSettingsAndCorners) {
  const fs::path folder = golden_folder() / "rope";
  const auto golden = SafetensorsFile::open(folder / "golden.safetensors");
  ASSERT_TRUE(golden) << golden.error().to_string();
  int num_cases = 0;
  for (const auto& [name, view] : golden->tensors()) {
    const size_t dot = name.find(".inv_freq");
    if (dot == std::string::npos) continue;
    const std::string case_name = name.substr(0, dot);
    std::ifstream file(folder / (case_name + ".json"));
    std::stringstream text;
    text << file.rdbuf();
    const auto config = parse_model_config(text.str(), case_name);
    ASSERT_TRUE(config) << config.error().to_string();
    expect_frequencies(floats(view), rope_inverse_frequencies(config->rope, config->head_dim),
                       case_name);
    const float factor = floats(golden->tensors().at(case_name + ".attention_factor")).at(0);
    EXPECT_EQ(factor, static_cast<float>(config->rope.attention_factor)) << case_name;
    ++num_cases;
  }
  EXPECT_EQ(num_cases, 11);
}

TEST(RopeGolden, TinyModels) {
  int num_models = 0;
  std::error_code fault;
  for (const auto& entry : fs::directory_iterator(golden_folder(), fault)) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    const std::string name = entry.path().filename().string();
    const auto config = load_model_config(entry.path());
    ASSERT_TRUE(config) << config.error().to_string();
    const auto golden = SafetensorsFile::open(entry.path() / "golden.safetensors");
    ASSERT_TRUE(golden) << golden.error().to_string();
    expect_frequencies(floats(golden->tensors().at("inv_freq")),
                       rope_inverse_frequencies(config->rope, config->head_dim), name);
    EXPECT_EQ(floats(golden->tensors().at("attention_factor")).at(0),
              static_cast<float>(config->rope.attention_factor))
        << name;
    ++num_models;
  }
  EXPECT_EQ(num_models, 9) << "in " << golden_folder() << " " << fault.message();
}

}  // namespace
}  // namespace clo
