#pragma once
// A profile as one safetensors file. Tensors, each of which may be absent:
//
//   importance    [num_layers, num_q_heads]                        s_i in [0, 1]
//   difficulty    [num_layers, num_kv_heads]                       D_i, higher = harder to reuse
//   hash_weights  [num_layers, num_kv_heads, head_dim + 1, code_bits]  trained projection, BF16;
//                 the last row is the bias of keys
//   and the statistics of profile/profile.h
//
// Metadata: "format", "model" = the fingerprint of the model it was measured on, and the facts of
// how it was made. "clo-profile-1" has the first three tensors alone, "clo-profile-2"
// all; both have hash_weights without a bias, which is read as 0.
#include <filesystem>
#include <string>

#include "io/model_config.h"
#include "io/safetensors.h"
#include "profile/profile.h"

namespace clo {

// Names a model's shape and rotary settings, so that a profile of another is refused.
std::string model_fingerprint(const ModelConfig& config);

// What the engine uses of a profile. Fails: kBadFile for a malformed file, another format version,
// another model, or hash weights of other code bits (what was expected and found are named).
Result<HeadProfile> load_profile(const std::filesystem::path& path, const ModelConfig& config,
                                 int32_t code_bits);

// All of it, whatever its code bits. Fails: as load_profile().
Result<Profile> load_whole_profile(const std::filesystem::path& path, const ModelConfig& config);
// The same from a file that is open.
Result<Profile> read_profile(const SafetensorsFile& file, const ModelConfig& config);

// The bytes of a file of the newest format.
std::string profile_bytes(const Profile& profile, const ModelConfig& config);

}  // namespace clo
