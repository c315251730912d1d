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
  Loader(const TensorFiles& files, DType type, Arena& arena, const WeightUpload& upload)
      : files_(files), type_(type), arena_(arena), upload_(upload) {}

  // Stacks matrices of `cols` columns, given as (name, rows), into one.
  Result<WeightView> matrix(const std::vector<std::pair<std::string, int64_t>>& parts,
                            int64_t cols) {
    WeightView view;
    view.type = type_;
    view.num_cols = cols;
    for (const auto& [name, rows] : parts) view.num_rows += rows;
    CLO_ASSIGN(std::byte * at, arena_.allocate(view.num_rows * cols * dtype_bytes(type_)));
    view.data = at;
    for (const auto& [name, rows] : parts) {
      const int64_t shape[] = {rows, cols};
      CLO_ASSIGN(const TensorView tensor, files_.require(name, shape));
      put(at, tensor, type_);
      at += rows * cols * dtype_bytes(type_);
    }
    return view;
  }

  // Joins vectors, given as (name, length), as f32.
  Result<const float*> vector(const std::vector<std::pair<std::string, int64_t>>& parts) {
    int64_t length = 0;
    for (const auto& [name, count] : parts) length += count;
    CLO_ASSIGN(std::byte* const block, arena_.allocate(length * int64_t{sizeof(float)}));
    std::byte* at = block;
    for (const auto& [name, count] : parts) {
      const int64_t shape[] = {count};
      CLO_ASSIGN(const TensorView tensor, files_.require(name, shape));
      put(at, tensor, DType::kF32);
      at += count * int64_t{sizeof(float)};
    }
    return reinterpret_cast<const float*>(block);
  }

 private:
  // Elements converted at a time: both buffers stay in the cache.
  static constexpr int64_t kPiece = int64_t{1} << 16;

  void put(std::byte* target, const TensorView& tensor, DType type) {
    if (tensor.type == type) {
      upload_(target, tensor.bytes, tensor.num_bytes());
      return;
    }
    const int64_t count = tensor.num_elements();
    floats_.resize(kPiece);
    converted_.resize(kPiece * sizeof(float));
    for (int64_t first = 0; first < count; first += kPiece) {
      const int64_t here = std::min(kPiece, count - first);
      convert_to_f32(tensor.type, tensor.bytes + first * dtype_bytes(tensor.type), floats_.data(),
                     here);
      convert_from_f32(type, floats_.data(), converted_.data(), here);
      upload_(target + first * dtype_bytes(type), converted_.data(), here * dtype_bytes(type));
    }
  }

  const TensorFiles& files_;
  DType type_;
  Arena& arena_;
  const WeightUpload& upload_;
  std::vector<float> floats_;
  std::vector<std::byte> converted_;
};

// Makes tensors of the same shapes from nothing.
struct Maker {
  DType type;
  Arena& arena;
  const Weights::Fill& fill;

  Result<WeightView> matrix(const std::vector<std::pair<std::string, int64_t>>& parts,
                            int64_t cols) {
    WeightView view;
    view.type = type;
    view.num_cols = cols;
    for (const auto& [name, rows] : parts) view.num_rows += rows;
    CLO_ASSIGN(std::byte* const at, arena.allocate(view.num_rows * cols * dtype_bytes(type)));
    fill(at, type, view.num_rows * cols, cols);
    view.data = at;
    return view;
  }
  Result<const float*> vector(const std::vector<std::pair<std::string, int64_t>>& parts) {
    int64_t length = 0;
    for (const auto& [name, count] : parts) length += count;
    CLO_ASSIGN(std::byte* const at, arena.allocate(length * int64_t{sizeof(float)}));
    fill(at, DType::kF32, length, 0);
    return reinterpret_cast<const float*>(at);
  }
};

constexpr const char* kHead = "lm_head.weight";

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
  if (!c.tie_word_embeddings) list.push_back({kHead, {c.vocab_size, s.hidden}});
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

Status check_tensors(const ModelConfig& config, const TensorFiles& files) {
  for (const auto& [name, shape] : expected_tensors(config)) {
    Status found = files.check(name, shape);
    if (!found && name == kHead && found.error().code == ErrorCode::kBadFile &&
        !files.contains(name)) {
      Error error = std::move(found).error();
      error.message +=
          "; config.json says that the head is not the embedding: if it is, set "
          "\"tie_word_embeddings\" to true there, if not, download all weights";
      return error;
    }
    CLO_TRY(std::move(found));
  }
  return Ok{};
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

template <typename Source>
Status Weights::take_all(Source& source) {
  const ModelConfig& c = config_;
  const Sizes s = sizes_of(c);
  CLO_ASSIGN(embedding_, source.matrix({{"model.embed_tokens.weight", c.vocab_size}}, s.hidden));
  head_ = embedding_;
  if (!c.tie_word_embeddings) {
    CLO_ASSIGN(head_, source.matrix({{kHead, c.vocab_size}}, s.hidden));
  }
  CLO_ASSIGN(final_norm_, source.vector({{"model.norm.weight", s.hidden}}));
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
    LayerWeights& out = layers_.emplace_back();
    CLO_ASSIGN(out.input_norm, source.vector({{layer + "input_layernorm.weight", s.hidden}}));
    CLO_ASSIGN(out.mlp_norm,
               source.vector({{layer + "post_attention_layernorm.weight", s.hidden}}));
    CLO_ASSIGN(out.qkv, source.matrix({{attention + "q_proj.weight", s.q},
                                       {attention + "k_proj.weight", s.kv},
                                       {attention + "v_proj.weight", s.kv}},
                                      s.hidden));
    CLO_ASSIGN(out.output, source.matrix({{attention + "o_proj.weight", s.hidden}}, s.q));
    CLO_ASSIGN(out.gate_up, source.matrix({{mlp + "gate_proj.weight", s.inner},
                                           {mlp + "up_proj.weight", s.inner}},
                                          s.hidden));
    CLO_ASSIGN(out.down, source.matrix({{mlp + "down_proj.weight", s.hidden}}, s.inner));
    if (c.attention_bias) {
      CLO_ASSIGN(out.qkv_bias, source.vector({{attention + "q_proj.bias", s.q},
                                              {attention + "k_proj.bias", s.kv},
                                              {attention + "v_proj.bias", s.kv}}));
    }
    if (c.output_bias) {
      CLO_ASSIGN(out.output_bias, source.vector({{attention + "o_proj.bias", s.hidden}}));
    }
    if (c.mlp_bias) {
      CLO_ASSIGN(out.gate_up_bias, source.vector({{mlp + "gate_proj.bias", s.inner},
                                                  {mlp + "up_proj.bias", s.inner}}));
      CLO_ASSIGN(out.down_bias, source.vector({{mlp + "down_proj.bias", s.hidden}}));
    }
    if (c.qk_norm) {
      CLO_ASSIGN(out.q_norm, source.vector({{attention + "q_norm.weight", c.head_dim}}));
      CLO_ASSIGN(out.k_norm, source.vector({{attention + "k_norm.weight", c.head_dim}}));
    }
  }
  return Ok{};
}

Result<Weights> Weights::load(const ModelConfig& config, const TensorFiles& files, DType type,
                              Arena& arena, const WeightUpload& upload) {
  CLO_CHECK(type != DType::kF16);
  CLO_TRY(check_tensors(config, files));  // before gigabytes are copied
  const int64_t before = arena.used_bytes();
  Weights w(config, type);
  Loader loader(files, type, arena, upload);
  CLO_TRY(w.take_all(loader));
  w.bytes_ = arena.used_bytes() - before;
  return w;
}

Result<Weights> Weights::make(const ModelConfig& config, DType type, Arena& arena,
                              const Fill& fill) {
  const int64_t before = arena.used_bytes();
  Weights w(config, type);
  Maker maker{type, arena, fill};
  CLO_TRY(w.take_all(maker));
  w.bytes_ = arena.used_bytes() - before;
  return w;
}

}  // namespace clo
