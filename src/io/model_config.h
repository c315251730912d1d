#pragma once
// ModelConfig: the shape and rules of a model, read from config.json and checked. What this engine
// does not compute is refused here by name, so later rooms never meet it. Defaults of absent keys
// are those of transformers 5, except the token ids: absent means none. Plain values.
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"
#include "io/rope.h"
#include "tensor/dtype.h"
#include "tensor/weight_blocks.h"

namespace clo {

enum class ModelFamily { kLlama, kQwen2, kQwen3 };

struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
  std::string architecture;  // as config.json spells it, such as "LlamaForCausalLM"
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_q_heads = 0;  // a multiple of num_kv_heads
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;  // even; num_q_heads * head_dim may differ from hidden_size
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  // Tokens that some layers attend to, themselves included; 0: all. Not computed: a context of at
  // most so many tokens is served, where it is the same as full attention.
  int64_t sliding_window = 0;
  float rms_norm_eps = 1e-6f;
  bool tie_word_embeddings = false;
  bool attention_bias = false;  // of the q, k and v projections
  bool output_bias = false;     // of the o projection
  bool mlp_bias = false;
  bool qk_norm = false;  // RMS norm of every query and key head before the rotation
  RopeConfig rope;
  DType dtype = DType::kF32;  // of the published weights; the files decide
  // How a quantised file's matrices are kept, in the order of Weights: the embedding, the head
  // unless it is tied, then QKV, output, gate and up, down of each layer. Empty: no such file.
  std::vector<WeightBlocks> file_blocks;
  std::vector<int32_t> bos_ids;
  std::vector<int32_t> eos_ids;
};

// Reads config.json of a model directory (ModelFiles::config() also the metadata of a GGUF file).
// Fails: kUnsupported for a model or feature that is refused, kBadFile for a missing or
// malformed file, a missing key, or a value of the wrong type or out of range; the key is named.
Result<ModelConfig> load_model_config(const std::filesystem::path& model_dir);

// The same for text; `where` names it in messages. Fails: as load_model_config().
Result<ModelConfig> parse_model_config(std::string_view json, std::string where);

}  // namespace clo
