// Any text as config.json and as generation_config.json: an accepted model has usable dimensions
// and finite rotary frequencies.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>

#include "base/check.h"
#include "io/generation_config.h"
#include "io/model_config.h"
#include "json_mutation.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

void check_config(const clo::ModelConfig& config) {
  CLO_CHECK(config.num_kv_heads > 0 && config.num_q_heads % config.num_kv_heads == 0);
  CLO_CHECK(config.head_dim > 0 && config.head_dim % 2 == 0, config.head_dim);
  CLO_CHECK(config.hidden_size > 0 && config.num_layers > 0 && config.vocab_size > 0);
  CLO_CHECK(config.sliding_window >= 0 && config.sliding_window < config.max_positions,
            config.sliding_window);
  for (const int32_t id : config.eos_ids) CLO_CHECK(id >= 0 && id < config.vocab_size, id);
  for (const float frequency : clo::rope_inverse_frequencies(config.rope, config.head_dim)) {
    CLO_CHECK(std::isfinite(frequency) && frequency >= 0, frequency);
  }
  CLO_CHECK(std::isfinite(config.rope.attention_factor) && config.rope.attention_factor > 0);
  CLO_CHECK(!clo::describe_rope(config.rope).empty());
}

#ifdef CLO_FUZZ_PLANTED
// No seed is like this: a Qwen3 with biases and YaRN that is not truncated.
void planted_bug(const clo::ModelConfig& config) {
  if (config.family == clo::ModelFamily::kQwen3 &&
      config.rope.kind == clo::RopeConfig::Kind::kYarn && !config.rope.truncate &&
      config.attention_bias) {
    std::abort();
  }
}
#endif

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  clo::ModelConfig small;
  small.vocab_size = 128;
  const auto generation = clo::parse_generation_config(text, "input", small);
  if (generation) {
    for (const int32_t id : generation->eos_ids) CLO_CHECK(id >= 0 && id < small.vocab_size, id);
  }
  const auto config = clo::parse_model_config(text, "input");
  if (!config) {
    CLO_CHECK(!config.error().message.empty());
    return 0;
  }
  check_config(*config);
#ifdef CLO_FUZZ_PLANTED
  planted_bug(*config);
#endif
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr std::array<std::string_view, 20> kFragments = {
      R"("rope_scaling":{"type":"yarn","factor":4.0},)",
      R"("rope_parameters":{"rope_type":"linear","factor":2},)",
      R"("truncate":false,)",
      R"("mscale":0.7,)",
      R"("mscale_all_dim":0.5,)",
      R"("beta_fast":16,)",
      R"("attention_factor":1.2,)",
      R"("original_max_position_embeddings":64,)",
      R"("rope_theta":1e6,)",
      R"("attention_bias":true,)",
      R"("mlp_bias":true,)",
      R"("hidden_act":"silu",)",
      R"("dtype":"bfloat16",)",
      R"("layer_types":["full_attention","full_attention"],)",
      R"("layer_types":["full_attention","sliding_attention"],)",
      R"("sliding_window":64,"use_sliding_window":true,)",
      R"("quantization_config":{"quant_method":"awq"},)",
      R"("temperature":0.7,)",
      R"("top_k":20,)",
      R"("eos_token_id":[1,2],)"};
  std::minstd_rand random(seed);
  if (random() % 3 != 0) return LLVMFuzzerMutate(data, size, max_size);
  return clo::insert_json_fragment(data, 0, size, max_size, kFragments, random);
}
