#pragma once
// The model that seeds of the profile fuzzer are for: small, so that a whole profile is too.
#include "io/model_config.h"

namespace clo {

inline ModelConfig profile_model() {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.num_layers = 1;
  config.num_q_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 4;
  config.hidden_size = 8;
  config.vocab_size = 10;
  return config;
}

}  // namespace clo
