// Any bytes as a .gguf file: whatever is accepted must lie inside the bytes, its numbers must be
// readable, and a config made of it must be one that can be computed with.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "io/gguf_model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto file = clo::GgufFile::parse(bytes, "fuzz.gguf");
  if (!file) return 0;
  std::vector<float> values;
  for (const auto& [name, tensor] : file->tensors()) {
    if (tensor.bytes == nullptr) continue;
    CLO_CHECK(tensor.bytes >= bytes.data() && tensor.num_bytes > 0, name);
    CLO_CHECK(tensor.bytes + tensor.num_bytes <= bytes.data() + bytes.size(), name);
    const int64_t block = clo::ggml_type_info(tensor.type)->block_elements;
    const int64_t count = std::min<int64_t>(tensor.num_elements(), 16 * block) / block * block;
    values.resize(static_cast<size_t>(count));
    clo::dequantize(static_cast<clo::GgmlType>(tensor.type), tensor.bytes, values.data(), count);
  }
  const auto config = clo::gguf_model_config(*file);
  if (!config) return 0;
  CLO_CHECK(config->num_kv_heads > 0 && config->num_q_heads % config->num_kv_heads == 0);
  CLO_CHECK(config->head_dim > 0 && config->head_dim % 2 == 0 && config->vocab_size > 0);
  CLO_CHECK(config->sliding_window >= 0 && config->sliding_window < config->max_positions);
  if (config->head_dim <= 4096) {
    (void)clo::rope_inverse_frequencies(config->rope, config->head_dim);
  }
  return 0;
}
