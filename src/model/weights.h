#pragma once
// The weights of a decoder-only transformer, in the device arena, fused for the step: Q, K and V
// are one matrix, gate and up are another. Every tensor of the files is accounted for.
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "clo/engine.h"
#include "io/model_config.h"
#include "io/tensor_files.h"
#include "ops/params.h"
#include "tensor/arena.h"
#include "tensor/weight_tiles.h"

namespace clo {

struct LayerWeights {
  const float* input_norm = nullptr;  // [hidden_size]
  WeightView qkv;                     // [(num_q_heads + 2 num_kv_heads) * head_dim, hidden_size]
  const float* qkv_bias = nullptr;    // [rows of qkv] or null
  const float* q_norm = nullptr;      // [head_dim] or null
  const float* k_norm = nullptr;      // [head_dim] or null
  WeightView output;                  // [hidden_size, num_q_heads * head_dim]
  const float* output_bias = nullptr;
  const float* mlp_norm = nullptr;  // [hidden_size]
  WeightView gate_up;               // [2 * intermediate_size, hidden_size]
  const float* gate_up_bias = nullptr;
  WeightView down;  // [hidden_size, intermediate_size]
  const float* down_bias = nullptr;
};

// Writes bytes of a tensor to the arena's memory.
using WeightUpload = std::function<void(std::byte* target, const void* source, int64_t num_bytes)>;
inline void copy_weights(std::byte* target, const void* source, int64_t num_bytes) {
  std::memcpy(target, source, static_cast<size_t>(num_bytes));
}

// How each matrix lies in memory.
struct WeightPlan {
  DType type = DType::kBF16;         // of matrices that are not in blocks
  std::vector<WeightBlocks> blocks;  // in the order of ModelConfig::file_blocks; empty: none
  bool tiled = false;                // blocks in a GPU's tiles (tensor/weight_tiles.h)

  bool operator==(const WeightPlan&) const = default;
};
// auto: blocks where the file has them, `type` elsewhere. int8 and q4: every matrix, but with q4
// the embedding and the head, which everything depends on, in int8. `on_gpu`: plain matrices are of
// `type` alone, blocks in tiles. Fails: kUnsupported for another plain type there, and for int8 and
// q4 when a matrix has rows that are not whole blocks.
Result<WeightPlan> plan_weights(const ModelConfig& config, WeightStorage storage, DType type,
                                bool on_gpu);

// Bytes of a matrix as it lies in memory.
int64_t matrix_bytes(const WeightView& matrix);

// Every tensor that a model of this config must have, with its shape.
std::vector<std::pair<std::string, Shape>> expected_tensors(const ModelConfig& config);

// Whether the files hold every one of them. Fails: as TensorFiles::check(), with advice where only
// the head is missing.
Status check_tensors(const ModelConfig& config, const TensorFiles& files);

class Weights {
 public:
  // Bytes that load() will take from the arena.
  static int64_t required_bytes(const ModelConfig& config, const WeightPlan& plan);

  // Copies every tensor into `arena`, converting as planned (norms and biases to f32); blocks are
  // packed by num_threads.
  // Fails: kBadFile for a missing tensor or one whose shape disagrees with the config, kUnsupported
  // for its type, kDeviceMemory when the arena is too small.
  static Result<Weights> load(const ModelConfig& config, const TensorFiles& files,
                              const WeightPlan& plan, Arena& arena, int num_threads,
                              const WeightUpload& upload = copy_weights);
  // Takes the same memory without files, for measurements of a shape: `fill` writes each matrix and
  // each vector (norms and biases: f32 [length]). Fails: kDeviceMemory.
  struct Fill {
    std::function<void(std::byte* target, const WeightView& matrix)> matrix;
    std::function<void(float* target, int64_t length)> vector;
  };
  static Result<Weights> make(const ModelConfig& config, const WeightPlan& plan, Arena& arena,
                              const Fill& fill);

  const ModelConfig& config() const { return config_; }
  const std::vector<LayerWeights>& layers() const { return layers_; }
  WeightView embedding() const { return embedding_; }  // [vocab_size, hidden_size]
  const float* final_norm() const { return final_norm_; }
  WeightView head() const { return head_; }  // [vocab_size, hidden_size]; the embedding when tied
  DType type() const { return type_; }
  int64_t bytes() const { return bytes_; }

 private:
  Weights(const ModelConfig& config, DType type) : config_(config), type_(type) {}
  // Names, shapes and order of the tensors, wherever they come from.
  template <typename Source>
  Status take_all(Source& source);

  ModelConfig config_;
  DType type_ = DType::kBF16;
  std::vector<LayerWeights> layers_;
  WeightView embedding_, head_;
  const float* final_norm_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace clo
