#include "model/weights.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"

namespace clo {

namespace {

// Reads tensors into the arena.
class Loader {
 public:
  Loader(const TensorFiles& files, DType type, Arena& arena)
      : files_(files), type_(type), arena_(arena) {}

  // Stacks matrices of `cols` columns, given as (name, rows), into one.
  Result<WeightView> matrix(const std::vector<std::pair<std::string, int64_t>>& parts,
                            int64_t cols) {
    WeightView view;
    view.type = type_;
    view.num_cols = cols;
    for (const auto& [name, rows] : parts) view.num_rows += rows;
    CLO_ASSIGN(std::byte* at, arena_.allocate(view.num_rows * cols * dtype_bytes(type_)));
    view.data = at;
    std::vector<float> row(static_cast<size_t>(cols));
    for (const auto& [name, rows] : parts) {
      const int64_t shape[] = {rows, cols};
      CLO_ASSIGN(const TensorView tensor, files_.require(name, shape));
      const int64_t row_bytes = cols * dtype_bytes(tensor.type);
      for (int64_t r = 0; r < rows; ++r, at += cols * dtype_bytes(type_)) {
        const std::byte* source = tensor.bytes + r * row_bytes;
        if (tensor.type == type_) {
          std::copy_n(source, row_bytes, at);
        } else {
          convert_to_f32(tensor.type, source, row.data(), cols);
          convert_from_f32(type_, row.data(), at, cols);
        }
      }
    }
    return view;
  }

  // Joins vectors, given as (name, length), as f32.
  Result<const float*> vector(const std::vector<std::pair<std::string, int64_t>>& parts) {
    int64_t length = 0;
    for (const auto& [name, count] : parts) length += count;
    CLO_ASSIGN(std::byte* const block, arena_.allocate(length * int64_t{sizeof(float)}));
    auto* at = reinterpret_cast<float*>(block);
    for (const auto& [name, count] : parts) {
      const int64_t shape[] = {count};
      CLO_ASSIGN(const TensorView tensor, files_.require(name, shape));
      convert_to_f32(tensor.type, tensor.bytes, at, count);
      at += count;
    }
    return reinterpret_cast<const float*>(block);
  }

 private:
  const TensorFiles& files_;
  DType type_;
  Arena& arena_;
};

struct Sizes {
  int64_t q, kv, hidden, inner;
};

Sizes sizes_of(const ModelConfig& c) {
  return {c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size,
          c.intermediate_size};
}

}  // namespace

std::vector<std::pair<std::string, Shape>> expected_tensors(const ModelConfig& c) {
  const Sizes s = sizes_of(c);
  std::vector<std::pair<std::string, Shape>> list = {
      {"model.embed_tokens.weight", {c.vocab_size, s.hidden}}, {"model.norm.weight", {s.hidden}}};
  if (!c.tie_word_embeddings) list.push_back({"lm_head.weight", {c.vocab_size, s.hidden}});
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const auto linear = [&](const std::string& name, int64_t rows, int64_t cols, bool bias) {
      list.push_back({layer + name + ".weight", {rows, cols}});
      if (bias) list.push_back({layer + name + ".bias", {rows}});
    };
    linear("self_attn.q_proj", s.q, s.hidden, c.attention_bias);
    linear("self_attn.k_proj", s.kv, s.hidden, c.attention_bias);
    linear("self_attn.v_proj", s.kv, s.hidden, c.attention_bias);
    linear("self_attn.o_proj", s.hidden, s.q, c.output_bias);
    linear("mlp.gate_proj", s.inner, s.hidden, c.mlp_bias);
    linear("mlp.up_proj", s.inner, s.hidden, c.mlp_bias);
    linear("mlp.down_proj", s.hidden, s.inner, c.mlp_bias);
    list.push_back({layer + "input_layernorm.weight", {s.hidden}});
    list.push_back({layer + "post_attention_layernorm.weight", {s.hidden}});
    if (c.qk_norm) {
      list.push_back({layer + "self_attn.q_norm.weight", {c.head_dim}});
      list.push_back({layer + "self_attn.k_norm.weight", {c.head_dim}});
    }
  }
  return list;
}

int64_t Weights::required_bytes(const ModelConfig& c, DType type) {
  const Sizes s = sizes_of(c);
  int64_t total = 0;
  const auto matrix = [&](int64_t rows, int64_t cols) {
    total += round_up(rows * cols * dtype_bytes(type), Arena::kAlignment);
  };
  const auto vector = [&](int64_t length) {
    total += round_up(length * int64_t{sizeof(float)}, Arena::kAlignment);
  };
  matrix(c.vocab_size, s.hidden);
  if (!c.tie_word_embeddings) matrix(c.vocab_size, s.hidden);
  vector(s.hidden);
  for (int64_t l = 0; l < c.num_layers; ++l) {
    vector(s.hidden);
    vector(s.hidden);
    matrix(s.q + 2 * s.kv, s.hidden);
    matrix(s.hidden, s.q);
    matrix(2 * s.inner, s.hidden);
    matrix(s.hidden, s.inner);
    if (c.attention_bias) vector(s.q + 2 * s.kv);
    if (c.output_bias) vector(s.hidden);
    if (c.mlp_bias) {
      vector(2 * s.inner);
      vector(s.hidden);
    }
    if (c.qk_norm) {
      vector(c.head_dim);
      vector(c.head_dim);
    }
  }
  return total;
}

Result<Weights> Weights::load(const ModelConfig& c, const TensorFiles& files, DType type,
                              Arena& arena) {
  CLO_CHECK(type != DType::kF16);
  const Sizes s = sizes_of(c);
  const int64_t before = arena.used_bytes();
  Weights w;
  w.config_ = c;
  w.type_ = type;
  Loader loader(files, type, arena);
  CLO_ASSIGN(w.embedding_, loader.matrix({{"model.embed_tokens.weight", c.vocab_size}}, s.hidden));
  w.head_ = w.embedding_;
  if (!c.tie_word_embeddings) {
    CLO_ASSIGN(w.head_, loader.matrix({{"lm_head.weight", c.vocab_size}}, s.hidden));
  }
  CLO_ASSIGN(w.final_norm_, loader.vector({{"model.norm.weight", s.hidden}}));
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
    LayerWeights& out = w.layers_.emplace_back();
    CLO_ASSIGN(out.input_norm, loader.vector({{layer + "input_layernorm.weight", s.hidden}}));
    CLO_ASSIGN(out.mlp_norm,
               loader.vector({{layer + "post_attention_layernorm.weight", s.hidden}}));
    CLO_ASSIGN(out.qkv, loader.matrix({{attention + "q_proj.weight", s.q},
                                       {attention + "k_proj.weight", s.kv},
                                       {attention + "v_proj.weight", s.kv}},
                                      s.hidden));
    CLO_ASSIGN(out.output, loader.matrix({{attention + "o_proj.weight", s.hidden}}, s.q));
    CLO_ASSIGN(out.gate_up, loader.matrix({{mlp + "gate_proj.weight", s.inner},
                                           {mlp + "up_proj.weight", s.inner}},
                                          s.hidden));
    CLO_ASSIGN(out.down, loader.matrix({{mlp + "down_proj.weight", s.hidden}}, s.inner));
    if (c.attention_bias) {
      CLO_ASSIGN(out.qkv_bias, loader.vector({{attention + "q_proj.bias", s.q},
                                              {attention + "k_proj.bias", s.kv},
                                              {attention + "v_proj.bias", s.kv}}));
    }
    if (c.output_bias) {
      CLO_ASSIGN(out.output_bias, loader.vector({{attention + "o_proj.bias", s.hidden}}));
    }
    if (c.mlp_bias) {
      CLO_ASSIGN(out.gate_up_bias, loader.vector({{mlp + "gate_proj.bias", s.inner},
                                                  {mlp + "up_proj.bias", s.inner}}));
      CLO_ASSIGN(out.down_bias, loader.vector({{mlp + "down_proj.bias", s.hidden}}));
    }
    if (c.qk_norm) {
      CLO_ASSIGN(out.q_norm, loader.vector({{attention + "q_norm.weight", c.head_dim}}));
      CLO_ASSIGN(out.k_norm, loader.vector({{attention + "k_norm.weight", c.head_dim}}));
    }
  }
  w.bytes_ = arena.used_bytes() - before;
  return w;
}

}  // namespace clo
