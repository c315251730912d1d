#pragma once
// Small models with random weights and heads as wide as the kernels are cut for, written to a
// folder of their own: one of each family, so that both backends load the same files.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "base/check.h"
#include "io/model_config.h"
#include "model/weights.h"

namespace clo {

struct RandomModel {
  const char* name;
  const char* json;  // config.json
};

inline constexpr RandomModel kRandomModels[] = {
    {"llama",
     R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":256,
         "intermediate_size":384,"num_hidden_layers":3,"num_attention_heads":4,
         "num_key_value_heads":2,"head_dim":64,"vocab_size":512,"max_position_embeddings":8192,
         "rms_norm_eps":1e-5,"tie_word_embeddings":false,"hidden_act":"silu","dtype":"bfloat16",
         "rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3","factor":8.0,
         "low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":512}})"},
    {"qwen2",
     R"({"architectures":["Qwen2ForCausalLM"],"model_type":"qwen2","hidden_size":256,
         "intermediate_size":320,"num_hidden_layers":3,"num_attention_heads":7,
         "num_key_value_heads":1,"head_dim":128,"vocab_size":500,"max_position_embeddings":8192,
         "rms_norm_eps":1e-6,"tie_word_embeddings":true,"hidden_act":"silu","dtype":"bfloat16",
         "rope_theta":1000000.0})"},
    {"qwen3",
     R"({"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":192,
         "intermediate_size":256,"num_hidden_layers":4,"num_attention_heads":6,
         "num_key_value_heads":2,"head_dim":128,"vocab_size":768,"max_position_embeddings":8192,
         "rms_norm_eps":1e-6,"tie_word_embeddings":true,"hidden_act":"silu","dtype":"bfloat16",
         "rope_theta":1000000.0})"},
};

// A folder with config.json and model.safetensors, removed with the object. `nan_token`: the
// embedding of that token is not a number.
class RandomModelDir {
 public:
  explicit RandomModelDir(const RandomModel& model, int64_t nan_token = -1) {
    path_ = std::filesystem::temp_directory_path() / ("clo-random-" + std::string(model.name) +
                                                      "-" + std::to_string(std::random_device{}()));
    std::filesystem::create_directories(path_);
    std::ofstream(path_ / "config.json") << model.json;
    const ModelConfig config = parse_model_config(model.json, model.name).value();
    nlohmann::json header;
    std::string data;
    std::mt19937_64 generator(7);
    std::normal_distribution<float> normal;
    for (const auto& [name, shape] : expected_tensors(config)) {
      int64_t count = 1;
      for (const int64_t extent : shape) count *= extent;
      const size_t begin = data.size();
      const bool norm = name.find("norm") != std::string::npos;
      const float deviation =
          shape.size() == 1 ? 0.1f : 1.0f / std::sqrt(static_cast<float>(shape.back()));
      for (int64_t i = 0; i < count; ++i) {
        uint16_t bits = f32_to_bf16((norm ? 1.0f : 0.0f) + deviation * normal(generator));
        if (name.find("embed") != std::string::npos && i / shape.back() == nan_token) bits = 0x7FC0;
        data.append(reinterpret_cast<const char*>(&bits), sizeof bits);
      }
      header[name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
    }
    const std::string text = header.dump();
    const auto length = static_cast<uint64_t>(text.size());
    std::ofstream file(path_ / "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << text << data;
  }
  ~RandomModelDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  RandomModelDir(const RandomModelDir&) = delete;
  RandomModelDir& operator=(const RandomModelDir&) = delete;

  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace clo
