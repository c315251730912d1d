#include "io/gguf_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/try.h"
#include "io/refusal.h"

namespace clo {

namespace {

struct NamePair {
  std::string_view gguf, ours;
};
constexpr NamePair kModelNames[] = {
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
constexpr NamePair kLayerNames[] = {
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
};
constexpr std::string_view kRopeFactors = "rope_freqs.weight";

// "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; what has no such name stays.
std::string our_name(const std::string& gguf) {
  const size_t dot = gguf.rfind('.');
  if (dot == std::string::npos) return gguf;
  const std::string stem = gguf.substr(0, dot), ending = gguf.substr(dot);
  for (const NamePair& pair : kModelNames) {
    if (stem == pair.gguf) return std::string(pair.ours) + ending;
  }
  if (!stem.starts_with("blk.")) return gguf;
  const size_t after = stem.find('.', 4);
  if (after == std::string::npos) return gguf;
  for (const NamePair& pair : kLayerNames) {
    if (stem.compare(after + 1, std::string::npos, pair.gguf) == 0) {
      return "model.layers." + stem.substr(4, after - 4) + "." + std::string(pair.ours) + ending;
    }
  }
  return gguf;
}

class ConfigReader {
 public:
  ConfigReader(const GgufFile& file, std::string architecture)
      : file_(file), architecture_(std::move(architecture)) {}

  Result<ModelConfig> read() {
    CLO_TRY(read_family());
    CLO_TRY(refuse_features());
    CLO_TRY(read_shape());
    CLO_TRY(read_rope());
    CLO_TRY(read_tokens());
    read_types();
    read_blocks();
    return config_;
  }

 private:
  std::string key(std::string_view name) const { return architecture_ + "." + std::string(name); }
  bool has(const std::string& name) const { return file_.metadata().contains(name); }
  bool has_tensor(std::string_view name) const {
    return file_.tensors().contains(std::string(name));
  }
  Result<int64_t> count(std::string_view name, int64_t most) const {
    CLO_ASSIGN(const int64_t value, file_.integer(key(name)));
    if (value < 1 || value > most) {
      return bad_file(file_.where(), "metadata " + in_quotes(key(name)) + " is " +
                                         std::to_string(value) + ", expected 1 to " +
                                         std::to_string(most));
    }
    return value;
  }

  Status read_family() {
    config_.architecture = architecture_;
    if (architecture_ == "llama") {
      config_.family = ModelFamily::kLlama;
    } else if (architecture_ == "qwen2") {
      config_.family = ModelFamily::kQwen2;
    } else if (architecture_ == "qwen3") {
      config_.family = ModelFamily::kQwen3;
    } else {
      return unsupported(file_.where(), "\"general.architecture\" is " + in_quotes(architecture_) +
                                            "; supported are llama, qwen2 and qwen3");
    }
    return Ok{};
  }

  Status refuse_features() {
    if (has(key("expert_count"))) {
      CLO_ASSIGN(const int64_t experts, file_.integer(key("expert_count")));
      if (experts > 0) {
        return unsupported(file_.where(), in_quotes(key("expert_count")) + " is " +
                                              std::to_string(experts) +
                                              ": a mixture of experts is not supported");
      }
    }
    return Ok{};
  }

  Status read_shape() {
    constexpr int64_t kMost = int64_t{1} << 24;
    CLO_ASSIGN(config_.hidden_size, count("embedding_length", kMost));
    CLO_ASSIGN(config_.intermediate_size, count("feed_forward_length", kMost));
    CLO_ASSIGN(config_.num_layers, count("block_count", 4096));
    CLO_ASSIGN(config_.num_q_heads, count("attention.head_count", 65536));
    config_.num_kv_heads = config_.num_q_heads;
    if (has(key("attention.head_count_kv"))) {
      CLO_ASSIGN(config_.num_kv_heads, count("attention.head_count_kv", config_.num_q_heads));
    }
    if (config_.num_q_heads % config_.num_kv_heads != 0) {
      return bad_file(file_.where(), std::to_string(config_.num_q_heads) +
                                         " query heads are no multiple of " +
                                         std::to_string(config_.num_kv_heads) + " KV heads");
    }
    config_.head_dim = config_.hidden_size / config_.num_q_heads;
    if (has(key("attention.key_length"))) {
      CLO_ASSIGN(config_.head_dim, count("attention.key_length", 65536));
    }
    if (has(key("attention.value_length"))) {
      CLO_ASSIGN(const int64_t length, count("attention.value_length", 65536));
      if (length != config_.head_dim) {
        return unsupported(file_.where(), "keys of " + std::to_string(config_.head_dim) +
                                              " and values of " + std::to_string(length) +
                                              " elements: they must be equal");
      }
    }
    if (config_.head_dim < 2 || config_.head_dim % 2 != 0) {
      return bad_file(file_.where(), "heads of " + std::to_string(config_.head_dim) +
                                         " elements, expected an even number");
    }
    CLO_ASSIGN(config_.max_positions, count("context_length", int64_t{1} << 40));
    CLO_TRY(read_sliding_window());
    CLO_ASSIGN(const double epsilon, file_.number(key("attention.layer_norm_rms_epsilon")));
    config_.rms_norm_eps = static_cast<float>(epsilon);
    const auto embedding = file_.tensors().find("token_embd.weight");
    if (embedding == file_.tensors().end() || embedding->second.shape.size() != 2) {
      return bad_file(file_.where(), "tensor \"token_embd.weight\" is missing or no matrix");
    }
    config_.vocab_size = embedding->second.shape[0];
    config_.tie_word_embeddings = !has_tensor("output.weight");
    config_.attention_bias = has_tensor("blk.0.attn_q.bias");
    config_.output_bias = has_tensor("blk.0.attn_output.bias");
    config_.mlp_bias = has_tensor("blk.0.ffn_up.bias");
    config_.qk_norm = config_.family == ModelFamily::kQwen3;
    return Ok{};
  }

  // 0 stands for none.
  Status read_sliding_window() {
    const std::string name = key("attention.sliding_window");
    if (!has(name)) return Ok{};
    CLO_ASSIGN(const int64_t window, file_.integer(name));
    if (window < 0) {
      return bad_file(file_.where(), "metadata " + in_quotes(name) + " is " +
                                         std::to_string(window) + ", expected 0 or more");
    }
    if (window < config_.max_positions) config_.sliding_window = window;
    return Ok{};
  }

  Status read_rope() {
    RopeConfig& rope = config_.rope;
    if (has(key("rope.dimension_count"))) {
      CLO_ASSIGN(const int64_t rotated, count("rope.dimension_count", 65536));
      if (rotated != config_.head_dim) {
        return unsupported(file_.where(), "rotates " + std::to_string(rotated) + " of " +
                                              std::to_string(config_.head_dim) +
                                              " elements of a head: only whole heads are rotated");
      }
    }
    if (has(key("rope.freq_base"))) {
      CLO_ASSIGN(rope.theta, file_.number(key("rope.freq_base")));
      if (!(rope.theta > 0))
        return bad_file(file_.where(), in_quotes(key("rope.freq_base")) + " must be above 0");
    }
    CLO_TRY(read_scaling());
    const auto factors = file_.tensors().find(std::string(kRopeFactors));
    if (factors == file_.tensors().end()) return Ok{};
    if (rope.kind != RopeConfig::Kind::kDefault) {
      return unsupported(file_.where(), "has both " + in_quotes(std::string(kRopeFactors)) +
                                            " and a rope scaling");
    }
    const GgufTensor& tensor = factors->second;
    if (tensor.type != static_cast<uint32_t>(GgmlType::kF32) ||
        tensor.num_elements() != config_.head_dim / 2) {
      return bad_file(file_.where(), "tensor " + in_quotes(std::string(kRopeFactors)) +
                                         " is expected to be F32 of " +
                                         std::to_string(config_.head_dim / 2) + " elements");
    }
    rope.kind = RopeConfig::Kind::kFactors;
    rope.factors.resize(static_cast<size_t>(tensor.num_elements()));
    dequantize(GgmlType::kF32, tensor.bytes, rope.factors.data(), tensor.num_elements());
    for (const float factor : rope.factors) {
      if (!(factor > 0) || !std::isfinite(factor)) {
        return bad_file(file_.where(), "tensor " + in_quotes(std::string(kRopeFactors)) +
                                           " holds " + std::to_string(factor) +
                                           ", expected numbers above 0");
      }
    }
    return Ok{};
  }

  Status read_scaling() {
    RopeConfig& rope = config_.rope;
    std::string type = "none";
    if (has(key("rope.scaling.type"))) {
      CLO_ASSIGN(type, file_.text(key("rope.scaling.type")));
    } else if (has(key("rope.scale_linear"))) {
      type = "linear";
    }
    if (type == "none") return Ok{};
    if (type != "linear" && type != "yarn") {
      return unsupported(file_.where(), in_quotes(key("rope.scaling.type")) + " is " +
                                            in_quotes(type) +
                                            "; supported are none, linear and yarn");
    }
    CLO_ASSIGN(rope.factor,
               file_.number(key(has(key("rope.scaling.factor")) ? "rope.scaling.factor"
                                                                : "rope.scale_linear")));
    if (!(rope.factor >= 1)) {
      return bad_file(file_.where(), "a rope scaling factor of " + std::to_string(rope.factor) +
                                         ", expected at least 1");
    }
    rope.kind = type == "linear" ? RopeConfig::Kind::kLinear : RopeConfig::Kind::kYarn;
    if (type == "linear") return Ok{};
    CLO_ASSIGN(rope.original_max_positions,
               count("rope.scaling.original_context_length", int64_t{1} << 40));
    rope.attention_factor = 0.1 * std::log(rope.factor) + 1;
    if (has(key("rope.scaling.attn_factor"))) {
      CLO_ASSIGN(const double factor, file_.number(key("rope.scaling.attn_factor")));
      rope.attention_factor *= factor;
    }
    return Ok{};
  }

  Status read_tokens() {
    const auto add = [&](const char* name, std::vector<int32_t>& ids) -> Status {
      if (!has(name)) return Ok{};
      CLO_ASSIGN(const int64_t id, file_.integer(name));
      if (id < 0 || id >= config_.vocab_size) {
        return bad_file(file_.where(), "metadata " + in_quotes(name) + " is " + std::to_string(id) +
                                           ", the vocabulary has " +
                                           std::to_string(config_.vocab_size) + " tokens");
      }
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) {
        ids.push_back(static_cast<int32_t>(id));
      }
      return Ok{};
    };
    CLO_TRY(add("tokenizer.ggml.bos_token_id", config_.bos_ids));
    CLO_TRY(add("tokenizer.ggml.eos_token_id", config_.eos_ids));
    return add("tokenizer.ggml.eot_token_id", config_.eos_ids);
  }

  // What the weights are computed in by default: the narrowest type that keeps every matrix that is
  // not quantised; of quantised numbers bf16 keeps as much as their scales have.
  void read_types() {
    bool f32 = false, f16 = false, bf16 = false;
    for (const auto& [name, tensor] : file_.tensors()) {
      if (tensor.shape.size() < 2) continue;
      f32 = f32 || tensor.type == static_cast<uint32_t>(GgmlType::kF32);
      f16 = f16 || tensor.type == static_cast<uint32_t>(GgmlType::kF16);
      bf16 = bf16 || tensor.type == static_cast<uint32_t>(GgmlType::kBF16);
    }
    config_.dtype = f32 || (f16 && bf16) ? DType::kF32 : (f16 ? DType::kF16 : DType::kBF16);
  }

  // One format for each matrix of a step, which may be several tensors.
  void read_blocks() {
    const auto add = [&](const std::string& prefix, std::initializer_list<const char*> names) {
      std::vector<GgmlType> types;
      for (const char* name : names) {
        const auto found = file_.tensors().find(prefix + name + ".weight");
        if (found == file_.tensors().end()) return;  // Weights will miss it, and say so
        types.push_back(static_cast<GgmlType>(found->second.type));
      }
      config_.file_blocks.push_back(blocks_for(types));
    };
    add("", {"token_embd"});
    if (!config_.tie_word_embeddings) add("", {"output"});
    for (int64_t l = 0; l < config_.num_layers; ++l) {
      const std::string layer = "blk." + std::to_string(l) + ".";
      add(layer, {"attn_q", "attn_k", "attn_v"});
      add(layer, {"attn_output"});
      add(layer, {"ffn_gate", "ffn_up"});
      add(layer, {"ffn_down"});
    }
    const auto matrices =
        static_cast<size_t>(4 * config_.num_layers + (config_.tie_word_embeddings ? 1 : 2));
    if (config_.file_blocks.size() != matrices) config_.file_blocks.clear();
  }

  const GgufFile& file_;
  const std::string architecture_;
  ModelConfig config_;
};

// Rows of a query or key matrix of llama files lie in pairs that are rotated together; ours are two
// halves of a head. Where in the file a row of ours is:
int64_t row_in_pairs(int64_t row, int64_t head_dim) {
  const int64_t head = row / head_dim, inside = row % head_dim, half = head_dim / 2;
  return head * head_dim + inside % half * 2 + inside / half;
}

// `width`: elements of a row.
void undo_pairs(const float* source, float* target, int64_t num_heads, int64_t head_dim,
                int64_t width) {
  for (int64_t row = 0; row < num_heads * head_dim; ++row) {
    std::copy_n(source + row_in_pairs(row, head_dim) * width, width, target + row * width);
  }
}

}  // namespace

bool is_gguf(const std::filesystem::path& path) { return path.extension() == ".gguf"; }

Result<ModelConfig> gguf_model_config(const GgufFile& file) {
  CLO_ASSIGN(std::string architecture, file.text("general.architecture"));
  return ConfigReader(file, std::move(architecture)).read();
}

Result<GgufTensors> GgufTensors::open(std::shared_ptr<const GgufFile> file) {
  GgufTensors tensors;
  CLO_ASSIGN(tensors.config_, gguf_model_config(*file));
  for (const auto& [name, tensor] : file->tensors()) {
    if (name != kRopeFactors) tensors.names_[our_name(name)] = name;
  }
  tensors.file_ = std::move(file);
  return tensors;
}

std::vector<std::string> GgufTensors::names() const {
  std::vector<std::string> all;
  for (const auto& [ours, gguf] : names_) all.push_back(ours);
  return all;
}

Status GgufTensors::check(const std::string& name, std::span<const int64_t> shape) const {
  const auto found = names_.find(name);
  if (found == names_.end()) {
    return bad_file(file_->where(), "tensor " + in_quotes(name) + " of shape " + shape_text(shape) +
                                        " is missing (under its GGUF name; " +
                                        std::to_string(names_.size()) + " tensors were found)");
  }
  const GgufTensor& tensor = file_->tensors().at(found->second);
  const std::string what = "tensor " + in_quotes(found->second);
  if (tensor.bytes == nullptr) {
    return unsupported(file_->where(tensor),
                       what + " has type " + ggml_type_name(tensor.type) +
                           ", which is not read; use another quantisation of the "
                           "model");
  }
  if (!std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) {
    return bad_file(file_->where(tensor), what + " has shape " + shape_text(tensor.shape) +
                                              ", expected " + shape_text(shape) +
                                              " from the metadata");
  }
  return Ok{};
}

bool GgufTensors::lies_in_pairs(const std::string& name) const {
  return config_.family == ModelFamily::kLlama &&
         (name.find("q_proj.") != std::string::npos || name.find("k_proj.") != std::string::npos);
}

bool GgufTensors::block_row(const std::string& name, int64_t row, WeightBlocks blocks,
                            BlockRow& target) const {
  const GgufTensor& tensor = file_->tensors().at(names_.at(name));
  const auto type = static_cast<GgmlType>(tensor.type);
  const GgmlTypeInfo* info = ggml_type_info(tensor.type);
  const int64_t cols = tensor.shape[1];
  if (lies_in_pairs(name)) row = row_in_pairs(row, config_.head_dim);
  const int64_t row_bytes = cols / info->block_elements * info->block_bytes;
  return take_block_row(type, blocks, tensor.bytes + row * row_bytes, cols, target);
}

Result<TensorView> GgufTensors::require(const std::string& name, std::span<const int64_t> shape) {
  CLO_TRY(check(name, shape));
  const std::string& in_file = names_.at(name);
  const GgufTensor& tensor = file_->tensors().at(in_file);
  const auto type = static_cast<GgmlType>(tensor.type);
  const bool is_query = name.find("q_proj.") != std::string::npos;
  const bool in_pairs = lies_in_pairs(name);
  TensorView view;
  view.shape = tensor.shape;
  if (!in_pairs && (type == GgmlType::kF32 || type == GgmlType::kF16 || type == GgmlType::kBF16)) {
    view.bytes = tensor.bytes;
    view.type = type == GgmlType::kF32   ? DType::kF32
                : type == GgmlType::kF16 ? DType::kF16
                                         : DType::kBF16;
    return view;
  }
  const int64_t count = tensor.num_elements();
  expanded_.resize(static_cast<size_t>(count));
  dequantize(type, tensor.bytes, expanded_.data(), count);
  const std::vector<float>* result = &expanded_;
  if (in_pairs) {
    ordered_.resize(expanded_.size());
    undo_pairs(expanded_.data(), ordered_.data(),
               is_query ? config_.num_q_heads : config_.num_kv_heads, config_.head_dim,
               tensor.shape.size() == 2 ? tensor.shape[1] : 1);
    result = &ordered_;
  }
  view.bytes = reinterpret_cast<const std::byte*>(result->data());
  view.type = DType::kF32;
  return view;
}

}  // namespace clo
