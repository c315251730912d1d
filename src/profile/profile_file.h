#pragma once
// Reads a profile: what was measured offline about a model's heads, as one safetensors file.
//
//   importance   F32 [num_layers, num_q_heads]                         s_i in [0, 1]
//   difficulty   F32 [num_layers, num_kv_heads]                        D_i, higher = harder to reuse
//   hash_weights F32 [num_layers, num_kv_heads, head_dim, code_bits]   trained projection
//
// Each tensor may be absent. Metadata: "format" = "clo-profile-1" and "model" = the fingerprint of
// the model it was measured on (see model_fingerprint).
#include <filesystem>
#include <string>

#include "attention/kv_system.h"
#include "io/model_config.h"

namespace clo {

// Names a model's shape and rotary settings, so that a profile of another is refused.
std::string model_fingerprint(const ModelConfig& config);

// Fails: kBadFile for a malformed file, another format version or another model (both are named).
Result<HeadProfile> load_profile(const std::filesystem::path& path, const ModelConfig& config,
                                 int32_t code_bits);

}  // namespace clo
