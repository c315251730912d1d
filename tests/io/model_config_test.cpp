#include "io/model_config.h"

#include <gtest/gtest.h>

#include <map>

#include "temp_files.h"

namespace clo {
namespace {

constexpr ErrorCode kBad = ErrorCode::kBadFile;
constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;

// A small Llama config as key -> JSON text, with changes; an empty text removes the key.
std::string config_text(const std::map<std::string, std::string>& changes = {}) {
  std::map<std::string, std::string> settings = {{"architectures", "[\"LlamaForCausalLM\"]"},
                                                 {"model_type", "\"llama\""},
                                                 {"hidden_size", "64"},
                                                 {"intermediate_size", "80"},
                                                 {"num_hidden_layers", "2"},
                                                 {"num_attention_heads", "4"},
                                                 {"num_key_value_heads", "2"},
                                                 {"vocab_size", "128"},
                                                 {"max_position_embeddings", "2048"}};
  for (const auto& [key, value] : changes) settings[key] = value;
  std::string text = "{";
  for (const auto& [key, value] : settings) {
    if (!value.empty()) text += (text.size() > 1 ? "," : "") + ("\"" + key + "\":") + value;
  }
  return text + "}";
}

Result<ModelConfig> parse(const std::map<std::string, std::string>& changes) {
  return parse_model_config(config_text(changes), "config.json");
}
Result<ModelConfig> parse_qwen(int version, std::map<std::string, std::string> changes) {
  const std::string number = std::to_string(version);
  changes.emplace("architectures", "[\"Qwen" + number + "ForCausalLM\"]");
  changes.emplace("model_type", "\"qwen" + number + "\"");
  return parse(changes);
}
ModelConfig accepted(const Result<ModelConfig>& config) {
  EXPECT_TRUE(config) << config.error().to_string();
  return config ? *config : ModelConfig{};
}

TEST(ModelConfig, Llama31_8B) {
  const ModelConfig config = accepted(parse_model_config(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256})",
                                                         "config.json"));
  EXPECT_EQ(config.family, ModelFamily::kLlama);
  EXPECT_EQ(config.architecture, "LlamaForCausalLM");
  EXPECT_EQ(config.hidden_size, 4096);
  EXPECT_EQ(config.intermediate_size, 14336);
  EXPECT_EQ(config.num_layers, 32);
  EXPECT_EQ(config.num_q_heads, 32);
  EXPECT_EQ(config.num_kv_heads, 8);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.vocab_size, 128256);
  EXPECT_EQ(config.max_positions, 131072);
  EXPECT_EQ(config.rms_norm_eps, 1e-5f);
  EXPECT_FALSE(config.tie_word_embeddings || config.attention_bias || config.output_bias ||
               config.mlp_bias || config.qk_norm);
  EXPECT_EQ(config.dtype, DType::kBF16);
  EXPECT_EQ(config.bos_ids, std::vector<int32_t>{128000});
  EXPECT_EQ(config.eos_ids, (std::vector<int32_t>{128001, 128008, 128009}));
  EXPECT_EQ(describe_rope(config.rope),
            "llama3, theta 500000, factor 8, low_freq_factor 1, high_freq_factor 4, original "
            "positions 8192");
}

TEST(ModelConfig, Qwen25_7BWithYarn) {
  const ModelConfig config = accepted(parse_model_config(R"({
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "use_cache": true, "use_sliding_window": false, "vocab_size": 152064,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}})",
                                                         "config.json"));
  EXPECT_EQ(config.family, ModelFamily::kQwen2);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.num_q_heads / config.num_kv_heads, 7);
  EXPECT_TRUE(config.attention_bias);
  EXPECT_FALSE(config.output_bias);
  EXPECT_FALSE(config.qk_norm);
  EXPECT_EQ(config.eos_ids, std::vector<int32_t>{151645});
  EXPECT_EQ(config.rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_NEAR(config.rope.attention_factor, 1.1386294361119891, 1e-15);
  EXPECT_EQ(describe_rope(config.rope),
            "yarn, theta 1000000, factor 4, original positions 32768, beta_fast 32, beta_slow 1, "
            "attention_factor 1.13862943611");
}

TEST(ModelConfig, Qwen3_8B) {
  const ModelConfig config = accepted(parse_model_config(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})",
                                                         "config.json"));
  EXPECT_EQ(config.family, ModelFamily::kQwen3);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_FALSE(config.attention_bias);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(describe_rope(config.rope), "default, theta 1000000");
}

TEST(ModelConfig, ReadsTheShippedModel) {
  const ModelConfig config = accepted(load_model_config(CLO_SOURCE_DIR "/models/recall-7m"));
  EXPECT_EQ(config.hidden_size, 256);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.rope.theta, 500000);
}

TEST(ModelConfig, BothSpellingsGiveTheSame) {
  const ModelConfig old_keys =
      accepted(parse({{"rope_theta", "5e5"},
                      {"torch_dtype", "\"float16\""},
                      {"rope_scaling", R"({"type":"linear","factor":2})"}}));
  const ModelConfig new_keys = accepted(
      parse({{"dtype", "\"float16\""},
             {"rope_parameters", R"({"rope_type":"linear","factor":2.0,"rope_theta":500000.0})"}}));
  EXPECT_EQ(old_keys.rope, new_keys.rope);
  EXPECT_EQ(old_keys.rope.theta, 500000);
  EXPECT_EQ(old_keys.rope.factor, 2);
  EXPECT_EQ(old_keys.dtype, DType::kF16);
  EXPECT_EQ(new_keys.dtype, DType::kF16);
}

TEST(ModelConfig, DefaultsFollowTransformers) {
  const ModelConfig config = accepted(parse({{"num_key_value_heads", ""}}));
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.rms_norm_eps, 1e-6f);
  EXPECT_EQ(config.rope, RopeConfig{});
  EXPECT_EQ(config.rope.theta, 10000);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_TRUE(config.eos_ids.empty());
  EXPECT_EQ(config.dtype, DType::kF32);
  EXPECT_EQ(accepted(parse({{"architectures", ""}})).architecture, "LlamaForCausalLM");
  EXPECT_EQ(accepted(parse_qwen(3, {})).head_dim, 128);
  EXPECT_EQ(accepted(parse_qwen(2, {})).head_dim, 16);
}

TEST(ModelConfig, BiasesAreTheFamilys) {
  const ModelConfig llama = accepted(parse({{"attention_bias", "true"}, {"mlp_bias", "true"}}));
  EXPECT_TRUE(llama.attention_bias && llama.output_bias && llama.mlp_bias);
  const ModelConfig qwen3 = accepted(parse_qwen(3, {{"attention_bias", "true"}}));
  EXPECT_TRUE(qwen3.attention_bias && qwen3.output_bias);
  expect_refused(parse_qwen(2, {{"mlp_bias", "true"}}), kUnsupported, {"mlp_bias", "Qwen2"});
}

TEST(ModelConfig, RefusesOtherArchitecturesByName) {
  for (const std::string name : {"Gemma2ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM",
                                 "Qwen3MoeForCausalLM", "LlamaForSequenceClassification"}) {
    expect_refused(parse({{"architectures", "[\"" + name + "\"]"}}), kUnsupported,
                   {name, "Qwen3ForCausalLM"});
  }
  expect_refused(parse({{"architectures", ""}, {"model_type", "\"phi3\""}}), kUnsupported,
                 {"phi3"});
  expect_refused(parse({{"model_type", "\"mistral\""}}), kUnsupported,
                 {"LlamaForCausalLM", "\"mistral\""});
  expect_refused(parse({{"architectures", "[\"Mistral3ForCausalLM\"]"}}), kUnsupported,
                 {"Mistral3ForCausalLM", "MistralForCausalLM"});
  expect_refused(parse({{"architectures", "[]"}, {"model_type", ""}}), kBad,
                 {"architectures", "model_type"});
}

Result<ModelConfig> parse_mistral(std::map<std::string, std::string> changes) {
  changes.emplace("architectures", "[\"MistralForCausalLM\"]");
  changes.emplace("model_type", "\"mistral\"");
  return parse(changes);
}

TEST(ModelConfig, Mistral7B) {
  const std::string first = R"({
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
    "vocab_size": 32000})";
  const ModelConfig config = accepted(parse_model_config(first, "config.json"));
  EXPECT_EQ(config.family, ModelFamily::kLlama);
  EXPECT_EQ(config.architecture, "MistralForCausalLM");
  EXPECT_EQ(config.num_kv_heads, 8);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.rope.theta, 10000.0);
  EXPECT_EQ(config.sliding_window, 4096);
  EXPECT_FALSE(config.attention_bias || config.output_bias || config.mlp_bias || config.qk_norm);
  std::string third = first;
  third.replace(third.find("4096,\n    \"tie"), 4, "null");
  EXPECT_EQ(accepted(parse_model_config(third, "config.json")).sliding_window, 0);
}

// As transformers' MistralConfig: an absent key is not a null one.
TEST(ModelConfig, MistralDefaults) {
  const std::string long_context = "32768";
  const auto mistral = [&](std::map<std::string, std::string> changes) {
    changes.emplace("max_position_embeddings", long_context);
    changes.emplace("num_attention_heads", "16");
    return parse_mistral(changes);
  };
  EXPECT_EQ(accepted(mistral({})).sliding_window, 4096);
  EXPECT_EQ(accepted(mistral({{"sliding_window", "null"}})).sliding_window, 0);
  EXPECT_EQ(accepted(mistral({{"use_sliding_window", "false"}})).sliding_window, 4096);
  EXPECT_EQ(accepted(mistral({{"num_key_value_heads", ""}})).num_kv_heads, 8);
  EXPECT_EQ(accepted(mistral({{"num_key_value_heads", "null"}})).num_kv_heads, 16);
  expect_refused(mistral({{"attention_bias", "true"}}), kUnsupported,
                 {"attention_bias", "MistralForCausalLM"});
  expect_refused(mistral({{"mlp_bias", "true"}}), kUnsupported, {"mlp_bias", "MistralForCausalLM"});
}

TEST(ModelConfig, SlidingWindowIsCarriedOnlyInForce) {
  const auto window = [](const Result<ModelConfig>& config) {
    return accepted(config).sliding_window;
  };
  const std::string sliding = R"(["full_attention","sliding_attention"])";
  const std::string full = R"(["full_attention","full_attention"])";
  EXPECT_EQ(window(parse_qwen(2, {{"sliding_window", "64"}, {"use_sliding_window", "false"}})), 0);
  EXPECT_EQ(window(parse_qwen(2, {{"sliding_window", "64"}})), 0);
  EXPECT_EQ(window(parse_qwen(3, {{"layer_types", full}})), 0);
  EXPECT_EQ(
      window(parse_qwen(
          3, {{"layer_types", full}, {"sliding_window", "64"}, {"use_sliding_window", "true"}})),
      0);
  EXPECT_EQ(
      window(parse_qwen(
          3, {{"layer_types", sliding}, {"sliding_window", "64"}, {"use_sliding_window", "true"}})),
      64);
  EXPECT_EQ(window(parse_qwen(2, {{"sliding_window", "64"}, {"use_sliding_window", "true"}})), 64);
  EXPECT_EQ(window(parse({{"sliding_window", "4096"}})), 0);  // not below the positions
  EXPECT_EQ(window(parse({{"sliding_window", "64"}, {"use_sliding_window", "false"}})), 0);
  EXPECT_EQ(window(parse({{"sliding_window", "64"}})), 64);
  EXPECT_EQ(window(parse_mistral({{"sliding_window", "2047"}})), 2047);
  EXPECT_EQ(window(parse_mistral({{"sliding_window", "2048"}})), 0);

  expect_refused(parse_qwen(3, {{"layer_types", sliding}}), kUnsupported,
                 {"layer_types", "sliding_attention", "sliding_window"});
  expect_refused(parse_qwen(3, {{"layer_types", R"(["full_attention","linear_attention"])"}}),
                 kUnsupported, {"layer_types", "linear_attention"});
  expect_refused(parse_qwen(3, {{"layer_types", R"(["full_attention"])"}}), kBad,
                 {"layer_types", "1 layers", "2"});
  expect_refused(parse_mistral({{"sliding_window", "0"}}), kBad, {"sliding_window", "found 0"});
}

TEST(ModelConfig, RefusesWhatIsNotComputed) {
  expect_refused(parse({{"quantization_config", R"({"quant_method":"awq","bits":4})"}}),
                 kUnsupported, {"quantization_config", "awq", "bf16"});
  accepted(parse({{"quantization_config", "null"}}));
  expect_refused(parse({{"hidden_act", "\"gelu\""}}), kUnsupported, {"hidden_act", "gelu", "silu"});
  expect_refused(parse({{"partial_rotary_factor", "0.5"}}), kUnsupported,
                 {"partial_rotary_factor", "0.5"});
  accepted(parse({{"partial_rotary_factor", "1.0"}}));
  accepted(parse({{"pretraining_tp", "2"}}));
  expect_refused(parse({{"dtype", "\"float8_e4m3fn\""}}), kUnsupported, {"dtype", "float8_e4m3fn"});
}

TEST(ModelConfig, RefusesBadShapes) {
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"}) {
    for (const char* value : {"0", "-1", "2147483648", "9223372036854775807"}) {
      expect_refused(parse({{key, value}}), kBad, {"config.json", key, value});
    }
    for (const char* value : {"\"64\"", "64.0", "[64]", "true", "{}", "18446744073709551616"}) {
      expect_refused(parse({{key, value}}), kBad, {"config.json", key, "integer"});
    }
  }
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "vocab_size", "max_position_embeddings"}) {
    expect_refused(parse({{key, ""}}), kBad, {key, "missing"});
    expect_refused(parse({{key, "null"}}), kBad, {key, "missing"});
  }
  expect_refused(parse({{"num_key_value_heads", "3"}}), kBad,
                 {"num_key_value_heads", "(3)", "(4)"});
  expect_refused(parse({{"num_key_value_heads", "8"}}), kBad, {"num_key_value_heads", "(8)"});
  expect_refused(parse({{"head_dim", "15"}}), kBad, {"head_dim", "15", "even"});
  expect_refused(parse({{"hidden_size", "60"}}), kBad, {"head_dim", "15", "even"});
  expect_refused(parse({{"hidden_size", "66"}}), kBad, {"hidden_size", "(66)", "head_dim"});
}

TEST(ModelConfig, RefusesWrongTypes) {
  expect_refused(parse({{"architectures", "\"LlamaForCausalLM\""}}), kBad,
                 {"architectures", "list"});
  expect_refused(parse({{"architectures", "[1]"}}), kBad, {"architectures"});
  expect_refused(parse({{"model_type", "1"}}), kBad, {"model_type", "text"});
  expect_refused(parse({{"rms_norm_eps", "\"1e-5\""}}), kBad, {"rms_norm_eps", "number"});
  expect_refused(parse({{"rms_norm_eps", "0"}}), kBad, {"rms_norm_eps"});
  expect_refused(parse({{"rms_norm_eps", "-1e-5"}}), kBad, {"rms_norm_eps"});
  expect_refused(parse({{"tie_word_embeddings", "1"}}), kBad,
                 {"tie_word_embeddings", "true or false"});
  expect_refused(parse({{"attention_bias", "\"no\""}}), kBad, {"attention_bias"});
  expect_refused(parse({{"use_sliding_window", "0"}}), kBad, {"use_sliding_window"});
  expect_refused(parse({{"dtype", "16"}}), kBad, {"dtype", "text"});
  expect_refused(parse({{"rope_scaling", "\"yarn\""}}), kBad, {"rope_scaling", "object"});
  expect_refused(parse({{"rope_theta", "\"1e6\""}}), kBad, {"rope_theta", "number"});
}

TEST(ModelConfig, TokenIdsAreAnIntegerOrAList) {
  EXPECT_EQ(accepted(parse({{"eos_token_id", "5"}})).eos_ids, std::vector<int32_t>{5});
  EXPECT_EQ(accepted(parse({{"eos_token_id", "[5,6]"}})).eos_ids, (std::vector<int32_t>{5, 6}));
  EXPECT_TRUE(accepted(parse({{"eos_token_id", "null"}})).eos_ids.empty());
  expect_refused(parse({{"eos_token_id", "128"}}), kBad, {"eos_token_id", "128", "vocabulary"});
  expect_refused(parse({{"bos_token_id", "-1"}}), kBad, {"bos_token_id", "-1"});
  expect_refused(parse({{"eos_token_id", "\"5\""}}), kBad, {"eos_token_id", "integer"});
  expect_refused(parse({{"eos_token_id", "[5,\"6\"]"}}), kBad, {"eos_token_id"});
  expect_refused(parse({{"eos_token_id", "[5.5]"}}), kBad, {"eos_token_id"});
}

TEST(ModelConfig, RefusesBadJson) {
  const auto text = [](const std::string& json) { return parse_model_config(json, "config.json"); };
  expect_refused(text(""), kBad, {"config.json", "not valid JSON"});
  expect_refused(text("{\"a\":1,}"), kBad, {"not valid JSON at byte"});
  expect_refused(text("[]"), kBad, {"JSON object"});
  expect_refused(text("{\"x\":1e999}"), kBad, {"too large"});
  expect_refused(text("{\"a\":1,\"a\":2}"), kBad, {"\"a\" twice"});
  expect_refused(text("{\"a\":" + std::string(5000, '[') + std::string(5000, ']') + "}"), kBad,
                 {"levels deep"});
  expect_refused(text("{\"a\":" + std::string(500000, '[')), kBad, {"not valid JSON"});
}

TEST(ModelConfig, NamesAMissingOrHugeFile) {
  const TempFolder folder;
  expect_refused(load_model_config(folder.path()), kBad, {"config.json", "No such file"});
  folder.write("config.json", "");
  expect_refused(load_model_config(folder.path()), kBad, {"config.json", "empty"});
  folder.write("config.json", "version https://git-lfs.github.com/spec/v1\noid x\n");
  expect_refused(load_model_config(folder.path()), kBad, {"config.json", "LFS"});
  folder.write("config.json", std::string(size_t{17} << 20, ' '));
  expect_refused(load_model_config(folder.path()), kBad, {"config.json", "at most"});
}

}  // namespace
}  // namespace clo
