#include "model/shapes.h"

namespace clo {

namespace {

struct NamedShape {
  const char* name;
  ModelFamily family;
  const char* architecture;
  int64_t hidden, inner, layers, q_heads, kv_heads, vocab;
  double rope_theta;
};

constexpr NamedShape kShapes[] = {
    {"llama3-8b", ModelFamily::kLlama, "LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128256, 5e5},
    {"qwen2.5-7b", ModelFamily::kQwen2, "Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 152064, 1e6},
    {"qwen2.5-14b", ModelFamily::kQwen2, "Qwen2ForCausalLM", 5120, 13824, 48, 40, 8, 152064, 1e6},
    {"qwen3-8b", ModelFamily::kQwen3, "Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 151936, 1e6},
};

}  // namespace

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const NamedShape& shape : kShapes) names.push_back(shape.name);
  return names;
}

Result<ModelConfig> model_shape(std::string_view name) {
  std::string known;
  for (const NamedShape& shape : kShapes) {
    known += (known.empty() ? "" : ", ") + std::string(shape.name);
    if (name != shape.name) continue;
    ModelConfig c;
    c.family = shape.family;
    c.architecture = shape.architecture;
    c.hidden_size = shape.hidden;
    c.intermediate_size = shape.inner;
    c.num_layers = shape.layers;
    c.num_q_heads = shape.q_heads;
    c.num_kv_heads = shape.kv_heads;
    c.head_dim = 128;
    c.vocab_size = shape.vocab;
    // Measurements choose the context; the published limit does not bind random weights.
    c.max_positions = int64_t{1} << 21;
    c.rms_norm_eps = 1e-5f;
    c.attention_bias = shape.family == ModelFamily::kQwen2;
    c.qk_norm = shape.family == ModelFamily::kQwen3;
    c.rope.theta = shape.rope_theta;
    c.dtype = DType::kBF16;
    return c;
  }
  return Error{ErrorCode::kBadFlag,
               "expected one of " + known + "; found \"" + std::string(name) + "\"", "--shape"};
}

}  // namespace clo
