#include "profile/profile_file.h"

#include <algorithm>

#include "base/try.h"
#include "io/safetensors.h"

namespace clo {

namespace {

constexpr const char* kFormat = "clo-profile-1";

Result<std::vector<float>> read_tensor(const SafetensorsFile& file, const std::string& name,
                                       const Shape& shape, const std::string& where) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) return std::vector<float>{};
  const TensorView& tensor = found->second;
  if (tensor.shape != shape) {
    return Error{ErrorCode::kBadFile,
                 "tensor " + name + " has shape " + shape_text(tensor.shape) +
                     ", the model asks for " + shape_text(shape),
                 where};
  }
  std::vector<float> values(static_cast<size_t>(tensor.num_elements()));
  convert_to_f32(tensor.type, tensor.bytes, values.data(), tensor.num_elements());
  if (!std::all_of(values.begin(), values.end(), [](float x) { return x - x == 0; })) {
    return Error{ErrorCode::kBadFile, "tensor " + name + " holds a value that is not finite", where};
  }
  return values;
}

}  // namespace

std::string model_fingerprint(const ModelConfig& c) {
  std::string text = c.architecture;
  for (const int64_t size : {c.num_layers, c.hidden_size, c.num_q_heads, c.num_kv_heads,
                             c.head_dim, c.intermediate_size, c.vocab_size}) {
    text += "-" + std::to_string(size);
  }
  return text + "-" + describe_rope(c.rope);
}

Result<HeadProfile> load_profile(const std::filesystem::path& path, const ModelConfig& c,
                                 int32_t code_bits) {
  CLO_ASSIGN(const SafetensorsFile file, SafetensorsFile::open(path));
  const std::string where = path.string();
  const auto entry = [&](const char* key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? std::string() : found->second;
  };
  if (entry("format") != kFormat) {
    return Error{ErrorCode::kBadFile,
                 std::string("expected a profile of format \"") + kFormat + "\", found \"" +
                     entry("format") + "\"",
                 where};
  }
  if (entry("model") != model_fingerprint(c)) {
    return Error{ErrorCode::kBadFile,
                 "the profile was made for model \"" + entry("model") + "\", this model is \"" +
                     model_fingerprint(c) + "\"",
                 where};
  }
  HeadProfile profile;
  CLO_ASSIGN(profile.importance,
             read_tensor(file, "importance", {c.num_layers, c.num_q_heads}, where));
  CLO_ASSIGN(profile.difficulty,
             read_tensor(file, "difficulty", {c.num_layers, c.num_kv_heads}, where));
  CLO_ASSIGN(profile.hash_weights,
             read_tensor(file, "hash_weights",
                         {c.num_layers, c.num_kv_heads, c.head_dim, code_bits}, where));
  for (const float s : profile.importance) {
    if (s < 0 || s > 1) {
      return Error{ErrorCode::kBadFile, "importance must lie in [0, 1], found " + std::to_string(s),
                   where};
    }
  }
  return profile;
}

}  // namespace clo
