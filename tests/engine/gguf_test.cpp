// Models from GGUF files against the same models from Hugging Face directories: the files are made
// here, in f32, with the rows of llama's queries and keys in the order that converters give them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <span>

#include "gguf_writer.h"
#include "io/part_name.h"
#include "io/tensor_files.h"
#include "loaded_engine.h"
#include "model/weights.h"

namespace clo {
namespace {

struct Converted {
  std::string name;
  Shape shape;
  std::vector<float> values;
};

// "model.layers.3.self_attn.q_proj.weight" -> "blk.3.attn_q.weight".
std::string gguf_name(std::string name) {
  const std::pair<const char*, const char*> words[] = {
      {"model.embed_tokens", "token_embd"},
      {"model.norm", "output_norm"},
      {"lm_head", "output"},
      {"model.layers.", "blk."},
      {"post_attention_layernorm", "ffn_norm"},
      {"input_layernorm", "attn_norm"},
      {"self_attn.q_proj", "attn_q"},
      {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},
      {"self_attn.o_proj", "attn_output"},
      {"self_attn.q_norm", "attn_q_norm"},
      {"self_attn.k_norm", "attn_k_norm"},
      {"mlp.gate_proj", "ffn_gate"},
      {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"},
  };
  for (const auto& [ours, theirs] : words) {
    if (const size_t at = name.find(ours); at != std::string::npos) {
      name.replace(at, std::string(ours).size(), theirs);
    }
  }
  return name;
}

// Row i of the first half of a head and row i of the second lie side by side.
void make_pairs(std::vector<float>& values, int64_t heads, int64_t head_dim, int64_t width) {
  const std::vector<float> halves = values;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t i = 0; i < head_dim / 2; ++i) {
        std::copy_n(halves.begin() + (h * head_dim + half * head_dim / 2 + i) * width, width,
                    values.begin() + (h * head_dim + 2 * i + half) * width);
      }
    }
  }
}

std::vector<Converted> convert(const ModelConfig& config, const TensorFiles& files) {
  std::vector<Converted> tensors;
  for (const auto& [name, shape] : expected_tensors(config)) {
    const TensorView view = files.require(name, shape).value();
    Converted tensor{gguf_name(name), shape, {}};
    tensor.values.resize(static_cast<size_t>(view.num_elements()));
    convert_to_f32(view.type, view.bytes, tensor.values.data(), view.num_elements());
    const bool query = name.find("q_proj") != std::string::npos;
    if (config.family == ModelFamily::kLlama &&
        (query || name.find("k_proj") != std::string::npos)) {
      make_pairs(tensor.values, query ? config.num_q_heads : config.num_kv_heads, config.head_dim,
                 shape.size() == 2 ? shape[1] : 1);
    }
    tensors.push_back(std::move(tensor));
  }
  if (config.rope.kind == RopeConfig::Kind::kLlama3) {
    RopeConfig plain;
    plain.theta = config.rope.theta;
    const std::vector<float> base = rope_inverse_frequencies(plain, config.head_dim);
    const std::vector<float> scaled = rope_inverse_frequencies(config.rope, config.head_dim);
    Converted factors{"rope_freqs.weight", {config.head_dim / 2}, base};
    for (size_t i = 0; i < base.size(); ++i) factors.values[i] = base[i] / scaled[i];
    tensors.push_back(std::move(factors));
  }
  return tensors;
}

// The metadata of a model; `count` is how many values it has.
std::string metadata_of(const ModelConfig& c, uint64_t& count) {
  const std::string arch = c.family == ModelFamily::kLlama   ? "llama"
                           : c.family == ModelFamily::kQwen2 ? "qwen2"
                                                             : "qwen3";
  GgufWriter values;
  values.bytes.clear();
  count = 0;
  const auto integer = [&](const std::string& key, int64_t value) {
    values.integer(arch + "." + key, static_cast<uint32_t>(value));
    ++count;
  };
  const auto number = [&](const std::string& key, double value) {
    values.number(arch + "." + key, static_cast<float>(value));
    ++count;
  };
  values.words("general.architecture", arch);
  ++count;
  integer("embedding_length", c.hidden_size);
  integer("feed_forward_length", c.intermediate_size);
  integer("block_count", c.num_layers);
  integer("attention.head_count", c.num_q_heads);
  integer("attention.head_count_kv", c.num_kv_heads);
  integer("attention.key_length", c.head_dim);
  integer("context_length", c.max_positions);
  number("attention.layer_norm_rms_epsilon", static_cast<double>(c.rms_norm_eps));
  number("rope.freq_base", c.rope.theta);
  if (c.rope.kind == RopeConfig::Kind::kLinear || c.rope.kind == RopeConfig::Kind::kYarn) {
    const bool yarn = c.rope.kind == RopeConfig::Kind::kYarn;
    values.words(arch + ".rope.scaling.type", yarn ? "yarn" : "linear");
    ++count;
    number("rope.scaling.factor", c.rope.factor);
    if (yarn) integer("rope.scaling.original_context_length", c.rope.original_max_positions);
  }
  return values.bytes;
}

void write_file(const std::string& metadata, uint64_t count, std::span<const Converted> tensors,
                const std::filesystem::path& path) {
  GgufWriter file;
  file.head(tensors.size(), count);
  file.bytes += metadata;
  uint64_t offset = 0;
  for (const Converted& tensor : tensors) {
    file.tensor(tensor.name, {tensor.shape.rbegin(), tensor.shape.rend()}, 0, offset);
    offset += (tensor.values.size() * 4 + 31) / 32 * 32;
  }
  file.data(0);
  for (const Converted& tensor : tensors) {
    file.bytes.append(reinterpret_cast<const char*>(tensor.values.data()),
                      tensor.values.size() * 4);
    file.data(0);
  }
  std::ofstream(path, std::ios::binary) << file.bytes;
}

void write_gguf(const ModelConfig& c, const std::vector<Converted>& tensors,
                const std::filesystem::path& path) {
  uint64_t count = 0;
  const std::string metadata = metadata_of(c, count);
  write_file(metadata, count, tensors, path);
}

// The same in three parts; returns the first.
std::filesystem::path write_parts(const ModelConfig& c, const std::vector<Converted>& tensors,
                                  const std::filesystem::path& folder) {
  const size_t ends[] = {0, tensors.size() / 3, tensors.size() / 2, tensors.size()};
  const PartName name{"model", ".gguf", 1, 3};
  for (uint32_t part = 0; part < 3; ++part) {
    uint64_t count = 0;
    GgufWriter values;
    values.bytes = part == 0 ? metadata_of(c, count) : "";
    values.integer("split.no", part)
        .integer("split.count", 3)
        .integer("split.tensors.count", static_cast<uint32_t>(tensors.size()));
    write_file(values.bytes, count + 3,
               std::span(tensors).subspan(ends[part], ends[part + 1] - ends[part]),
               folder / name.of(part + 1));
  }
  return folder / name.of(1);
}

class GgufModels : public testing::TestWithParam<const char*> {
 protected:
  static std::vector<std::vector<float>> logits(const std::string& model, const std::string& path) {
    EngineOptions options = tiny_options(model);
    options.model_dir = path;
    options.dtype = WeightType::kF32;
    std::vector<std::vector<float>> out;
    const auto engine = load_engine(options);
    if (!engine) return out;
    Request request = ids_request(random_ids(700, 90, 3), 6, *preset("dense"));
    request.on_logits = [&](std::span<const float> row) {
      out.emplace_back(row.begin(), row.end());
    };
    answer_of(*engine, std::move(request));
    return out;
  }
};

TEST_P(GgufModels, EqualTheSameModelsFromADirectory) {
  const std::string name = GetParam();
  const std::string dir = tiny_options(name).model_dir;
  const auto config = load_model_config(dir);
  ASSERT_TRUE(config);
  const auto files = TensorFiles::open(dir);
  ASSERT_TRUE(files);
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("clo_" + name);
  std::filesystem::create_directory(folder);
  const std::vector<Converted> tensors = convert(*config, *files);
  write_gguf(*config, tensors, folder / "whole.gguf");
  const std::filesystem::path first = write_parts(*config, tensors, folder);
  const auto from_file = logits(name, (folder / "whole.gguf").string()),
             from_parts = logits(name, first.string()), from_dir = logits(name, dir);
  std::filesystem::remove_all(folder);
  EXPECT_EQ(from_parts, from_file);
  ASSERT_EQ(from_file.size(), 6u);
  ASSERT_EQ(from_dir.size(), 6u);
  // Frequencies that went through factors, and yarn's, can differ in their last bit.
  const bool exact = config->rope.kind == RopeConfig::Kind::kDefault ||
                     config->rope.kind == RopeConfig::Kind::kLinear;
  for (size_t i = 0; i < from_file.size(); ++i) {
    ASSERT_EQ(from_file[i].size(), from_dir[i].size());
    for (size_t j = 0; j < from_file[i].size(); ++j) {
      if (exact) {
        ASSERT_EQ(from_file[i][j], from_dir[i][j]) << name << " step " << i << " token " << j;
      } else {
        ASSERT_NEAR(from_file[i][j], from_dir[i][j], 1e-4) << name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GgufModels,
                         testing::Values("llama3", "llama31", "llama_linear", "llama_tied", "qwen2",
                                         "qwen2_yarn", "qwen3", "qwen3_group3"),
                         [](const auto& model) { return std::string(model.param); });

}  // namespace
}  // namespace clo
