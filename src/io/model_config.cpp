#include "io/model_config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/try.h"
#include "io/json_object.h"
#include "io/refusal.h"
#include "io/rope_reader.h"
#include "io/token_ids.h"

namespace clo {

namespace {

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

// Bounds far above any published model. They keep every product of two dimensions below 2^48.
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxLayers = 10'000;
constexpr int64_t kMaxHeads = int64_t{1} << 14;
constexpr int64_t kMaxHeadDim = 4096;
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxPositions = (int64_t{1} << 31) - 1;

struct Architecture {
  const char* name;
  const char* model_type;
  ModelFamily family;
};
// Without its sliding window, Mistral computes what Llama computes.
constexpr std::array<Architecture, 4> kArchitectures = {
    {{"LlamaForCausalLM", "llama", ModelFamily::kLlama},
     {"MistralForCausalLM", "mistral", ModelFamily::kLlama},
     {"Qwen2ForCausalLM", "qwen2", ModelFamily::kQwen2},
     {"Qwen3ForCausalLM", "qwen3", ModelFamily::kQwen3}}};
constexpr const char* kSupported =
    "supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM";

// What transformers' MistralConfig takes where config.json lacks the key; null means none.
constexpr int64_t kMistralWindow = 4096;
constexpr int64_t kMistralKvHeads = 8;

// Reads one config.json; the steps share the object and the result.
class ConfigReader {
 public:
  explicit ConfigReader(const JsonObject& json) : json_(json) {}

  Result<ModelConfig> read() {
    CLO_TRY(read_architecture());
    CLO_TRY(refuse_quantisation());
    CLO_TRY(read_shape());
    CLO_TRY(read_layers());
    CLO_TRY(read_sliding_window());
    CLO_ASSIGN(config_.rope, read_rope(json_, config_.max_positions));
    CLO_TRY(read_dtype());
    CLO_ASSIGN(config_.bos_ids, read_token_ids(json_, "bos_token_id", config_.vocab_size));
    CLO_ASSIGN(config_.eos_ids, read_token_ids(json_, "eos_token_id", config_.vocab_size));
    return std::move(config_);
  }

 private:
  Status read_architecture() {
    CLO_ASSIGN(const auto names, json_.texts("architectures"));
    CLO_ASSIGN(const auto model_type, json_.text("model_type"));
    if ((!names || names->empty()) && !model_type) {
      return bad_file(json_.where(),
                      "names neither \"architectures\" nor \"model_type\": is it the config.json "
                      "of a language model?");
    }
    const bool by_name = names && !names->empty();
    const auto* const found =
        std::find_if(kArchitectures.begin(), kArchitectures.end(), [&](const Architecture& known) {
          return by_name ? names->front() == known.name : *model_type == known.model_type;
        });
    if (found == kArchitectures.end()) {
      return unsupported(json_.where(), (by_name ? "architecture " + in_quotes(names->front())
                                                 : "model_type " + in_quotes(*model_type)) +
                                            " is not supported; " + kSupported);
    }
    if (model_type && *model_type != found->model_type) {
      return unsupported(json_.where(), "architecture " + in_quotes(found->name) +
                                            " comes with model_type " + in_quotes(*model_type) +
                                            ", expected \"" + found->model_type + "\"");
    }
    config_.family = found->family;
    config_.architecture = found->name;
    return Ok{};
  }

  Status refuse_quantisation() {
    for (const char* key : {"quantization_config", "compression_config"}) {
      if (!json_.has(key)) continue;
      std::string method = "unknown";
      CLO_ASSIGN(const std::optional<JsonObject> settings, json_.object(key));
      if (settings) {
        CLO_ASSIGN(const auto stated, settings->text("quant_method"));
        method = stated.value_or(method);
      }
      return unsupported(json_.where(), "\"" + std::string(key) + "\" (method " +
                                            in_quotes(method) +
                                            "): quantised weights are not "
                                            "supported, use the bf16 or f16 version of the model");
    }
    return Ok{};
  }

  // An integer in [1, high].
  Result<std::optional<int64_t>> size(const std::string& key, int64_t high) {
    CLO_ASSIGN(const std::optional<int64_t> value, json_.integer(key));
    if (value && (*value < 1 || *value > high)) {
      return bad_file(json_.where(), "\"" + key + "\" must be between 1 and " +
                                         std::to_string(high) + ", found " +
                                         std::to_string(*value));
    }
    return value;
  }
  Result<int64_t> required_size(const std::string& key, int64_t high) {
    CLO_ASSIGN(const std::optional<int64_t> value, size(key, high));
    if (!value) return bad_file(json_.where(), "\"" + key + "\" is missing");
    return *value;
  }
  bool is_mistral() const { return config_.architecture == "MistralForCausalLM"; }
  bool is_absent(const std::string& key) const {
    const std::vector<std::string> keys = json_.keys();
    return std::find(keys.begin(), keys.end(), key) == keys.end();
  }
  Result<bool> flag(const std::string& key, bool absent) {
    CLO_ASSIGN(const std::optional<bool> value, json_.boolean(key));
    return value.value_or(absent);
  }

  Status read_shape() {
    CLO_ASSIGN(config_.hidden_size, required_size("hidden_size", kMaxHidden));
    CLO_ASSIGN(config_.intermediate_size, required_size("intermediate_size", kMaxIntermediate));
    CLO_ASSIGN(config_.num_layers, required_size("num_hidden_layers", kMaxLayers));
    CLO_ASSIGN(config_.num_q_heads, required_size("num_attention_heads", kMaxHeads));
    CLO_ASSIGN(config_.vocab_size, required_size("vocab_size", kMaxVocab));
    CLO_ASSIGN(config_.max_positions, required_size("max_position_embeddings", kMaxPositions));
    CLO_TRY(read_kv_heads());
    return read_head_dim();
  }

  Status read_kv_heads() {
    CLO_ASSIGN(const auto num_kv_heads, size("num_key_value_heads", kMaxHeads));
    config_.num_kv_heads = num_kv_heads.value_or(
        is_mistral() && is_absent("num_key_value_heads") ? kMistralKvHeads : config_.num_q_heads);
    if (config_.num_q_heads % config_.num_kv_heads != 0) {
      return bad_file(json_.where(), "\"num_attention_heads\" (" +
                                         std::to_string(config_.num_q_heads) +
                                         ") must be a multiple of \"num_key_value_heads\" (" +
                                         std::to_string(config_.num_kv_heads) + ")");
    }
    return Ok{};
  }

  Status read_head_dim() {
    CLO_ASSIGN(const auto stated, size("head_dim", kMaxHeadDim));
    if (stated) {
      config_.head_dim = *stated;
    } else if (config_.family == ModelFamily::kQwen3) {
      config_.head_dim = 128;  // the default of transformers' Qwen3Config
    } else if (config_.hidden_size % config_.num_q_heads != 0) {
      return bad_file(json_.where(), "\"hidden_size\" (" + std::to_string(config_.hidden_size) +
                                         ") is no multiple of \"num_attention_heads\" (" +
                                         std::to_string(config_.num_q_heads) +
                                         ") and \"head_dim\" is missing");
    } else {
      config_.head_dim = config_.hidden_size / config_.num_q_heads;
    }
    if (config_.head_dim % 2 != 0 || config_.head_dim > kMaxHeadDim) {
      return bad_file(json_.where(), "\"head_dim\" is " + std::to_string(config_.head_dim) +
                                         (stated ? "" : " (hidden_size / num_attention_heads)") +
                                         ", expected an even number up to " +
                                         std::to_string(kMaxHeadDim));
    }
    return Ok{};
  }

  Status read_layers() {
    CLO_ASSIGN(const std::optional<double> eps, json_.number("rms_norm_eps"));
    if (eps && !(*eps > 1e-30 && *eps < 1)) {
      return bad_file(json_.where(), "\"rms_norm_eps\" must be above 0 and below 1, found " +
                                         std::to_string(*eps));
    }
    config_.rms_norm_eps = static_cast<float>(eps.value_or(1e-6));
    CLO_ASSIGN(const auto activation, json_.text("hidden_act"));
    if (activation && *activation != "silu" && *activation != "swish") {
      return unsupported(json_.where(), "\"hidden_act\" is " + in_quotes(*activation) +
                                            ", only \"silu\" is supported");
    }
    CLO_ASSIGN(config_.tie_word_embeddings, flag("tie_word_embeddings", false));
    CLO_ASSIGN(const bool attention_bias, flag("attention_bias", false));
    CLO_ASSIGN(const bool mlp_bias, flag("mlp_bias", false));
    // pretraining_tp is not read: it splits the same sums and changes no result.
    config_.qk_norm = config_.family == ModelFamily::kQwen3;
    if (config_.family == ModelFamily::kQwen2) {
      config_.attention_bias = true;
    } else {
      config_.attention_bias = config_.output_bias = attention_bias;
    }
    config_.mlp_bias = mlp_bias;
    if (attention_bias && is_mistral()) {
      return unsupported(json_.where(), "\"attention_bias\" is true, which " +
                                            config_.architecture + " does not define");
    }
    if (mlp_bias && (config_.family != ModelFamily::kLlama || is_mistral())) {
      return unsupported(json_.where(), "\"mlp_bias\" is true, which " + config_.architecture +
                                            " does not define");
    }
    return Ok{};
  }

  // Whether a layer is said to attend in a sliding window. Fails: kUnsupported for other kinds.
  Result<bool> has_sliding_layers(const std::vector<std::string>& types) const {
    if (std::ssize(types) != config_.num_layers) {
      return bad_file(json_.where(), "\"layer_types\" lists " + std::to_string(types.size()) +
                                         " layers, but \"num_hidden_layers\" is " +
                                         std::to_string(config_.num_layers));
    }
    for (const std::string& type : types) {
      if (type == "full_attention" || type == "sliding_attention") continue;
      return unsupported(json_.where(), "\"layer_types\" holds " + in_quotes(type) +
                                            ", only \"full_attention\" and, within its window, "
                                            "\"sliding_attention\" are supported");
    }
    return std::find(types.begin(), types.end(), "sliding_attention") != types.end();
  }

  Status read_sliding_window() {
    CLO_ASSIGN(const auto layer_types, json_.texts("layer_types"));
    bool sliding_layers = false;
    if (layer_types) {
      CLO_ASSIGN(sliding_layers, has_sliding_layers(*layer_types));
    }
    CLO_ASSIGN(std::optional<int64_t> window, size("sliding_window", kMaxPositions));
    if (is_mistral() && is_absent("sliding_window")) window = kMistralWindow;
    CLO_ASSIGN(const std::optional<bool> use, json_.boolean("use_sliding_window"));
    bool in_force = window.has_value();
    if (config_.family != ModelFamily::kLlama) {
      // The Qwen families use a window only where use_sliding_window says so, in the layers that
      // are listed.
      in_force = window && use.value_or(false) && (sliding_layers || !layer_types);
    } else if (!is_mistral()) {
      // Llama defines none: a window there is from a model of another family, in force unless it is
      // switched off.
      in_force = window && use.value_or(true);
    }
    if (sliding_layers && !in_force) {
      return unsupported(json_.where(),
                         "\"layer_types\" holds \"sliding_attention\", but no "
                         "\"sliding_window\" is in force that says how many tokens are attended");
    }
    if (in_force && *window < config_.max_positions) config_.sliding_window = *window;
    return Ok{};
  }

  Status read_dtype() {
    const std::string key = json_.has("dtype") ? "dtype" : "torch_dtype";
    CLO_ASSIGN(const auto name, json_.text(key));
    if (!name || *name == "float32") {
      config_.dtype = DType::kF32;
    } else if (*name == "float16") {
      config_.dtype = DType::kF16;
    } else if (*name == "bfloat16") {
      config_.dtype = DType::kBF16;
    } else {
      return unsupported(json_.where(), "\"" + key + "\" is " + in_quotes(*name) +
                                            "; supported are float32, float16 and bfloat16");
    }
    return Ok{};
  }

  const JsonObject& json_;
  ModelConfig config_;
};

}  // namespace

Result<ModelConfig> load_model_config(const std::filesystem::path& model_dir) {
  CLO_ASSIGN(const JsonObject json, JsonObject::read(model_dir / "config.json", kMaxConfigBytes));
  return ConfigReader(json).read();
}

Result<ModelConfig> parse_model_config(std::string_view text, std::string where) {
  CLO_ASSIGN(const JsonObject json, JsonObject::parse(text, std::move(where)));
  return ConfigReader(json).read();
}

}  // namespace clo
