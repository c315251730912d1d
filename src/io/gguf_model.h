#pragma once
// A GGUF file as the rest of this program knows models: its metadata as a ModelConfig, its tensors
// under their Hugging Face names and in their order of rows and dimensions, as numbers that are
// computed with. Architectures llama (under which Mistral models come too), qwen2 and qwen3;
// everything else is refused by name. A sliding window counts as far as the metadata states it.
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "clo/result.h"
#include "io/gguf.h"
#include "io/model_config.h"

namespace clo {

// Whether the path is meant as a GGUF file: by its name.
bool is_gguf(const std::filesystem::path& path);

// Fails: kUnsupported for an architecture or feature that is not computed, kBadFile for missing
// metadata or values out of range; the key is named.
Result<ModelConfig> gguf_model_config(const GgufFile& file);

class GgufTensors {
 public:
  // Fails: as gguf_model_config.
  static Result<GgufTensors> open(std::shared_ptr<const GgufFile> file);

  bool contains(const std::string& name) const { return names_.contains(name); }
  // Hugging Face names; a tensor that has none keeps its own. Without rope_freqs.weight, which the
  // config has taken in.
  std::vector<std::string> names() const;
  int64_t total_bytes() const { return file_->data_bytes(); }

  // Fails: kBadFile when the tensor is missing or has another shape, kUnsupported for its type.
  Status check(const std::string& name, std::span<const int64_t> shape) const;
  // The tensor: as it lies in the file where its type is F32, F16 or BF16 and its rows are in
  // order, expanded to f32 otherwise. Valid until the next call. Fails: as check().
  Result<TensorView> require(const std::string& name, std::span<const int64_t> shape);
  // Row `row` of a matrix in blocks, as in the file; false where that takes its numbers. Safe from
  // several threads. Requires: check().
  bool block_row(const std::string& name, int64_t row, WeightBlocks blocks, BlockRow& target) const;

 private:
  GgufTensors() = default;
  bool lies_in_pairs(const std::string& name) const;

  std::shared_ptr<const GgufFile> file_;
  ModelConfig config_;
  std::map<std::string, std::string> names_;  // Hugging Face name -> name in the file
  std::vector<float> expanded_, ordered_;
};

}  // namespace clo
