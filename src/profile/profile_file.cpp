#include "profile/profile_file.h"

#include <algorithm>
#include <charconv>

#include "base/try.h"
#include "io/safetensors_writer.h"

namespace clo {

namespace {

constexpr const char* kFormat = "clo-profile-3";
// Both have hash weights without a bias.
constexpr const char* kOldFormats[] = {"clo-profile-1", "clo-profile-2"};

Result<std::vector<float>> read_tensor(const SafetensorsFile& file, const std::string& name,
                                       const Shape& shape, const std::string& where) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) {
    const auto other = file.unsupported_tensors().find(name);
    if (other == file.unsupported_tensors().end()) return std::vector<float>{};
    return Error{ErrorCode::kBadFile,
                 "tensor " + name + " is of type " + other->second +
                     ", expected F32, F16 or BF16: make the profile again with clo profile",
                 where};
  }
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
    return Error{ErrorCode::kBadFile, "tensor " + name + " holds a value that is not finite",
                 where};
  }
  return values;
}

Status check_shares(const char* name, std::span<const float> values, const std::string& where) {
  for (const float s : values) {
    if (s < 0 || s > 1) {
      return Error{ErrorCode::kBadFile,
                   std::string(name) + " must lie in [0, 1], found " + std::to_string(s), where};
    }
  }
  return Ok{};
}

// Statistics are there together or not at all, and so are the figures of hashes: whoever shows them
// looks at one to know of all.
Status check_complete(const Profile& profile, std::span<const ProfileField> fields,
                      const std::string& where) {
  const auto missing = [&](const char* name) {
    return Error{ErrorCode::kBadFile,
                 "tensor " + std::string(name) +
                     " is missing, but others of the statistics are there: make the profile again "
                     "with clo profile",
                 where};
  };
  bool any = false, any_of_hash = false;
  for (const ProfileField& field : fields) {
    if (field.values->empty()) continue;
    any = true;
    any_of_hash = any_of_hash || is_of_hash(field);
  }
  for (const ProfileField& field : fields) {
    const bool expected = is_of_hash(field) ? any_of_hash : any;
    if (expected && field.values->empty()) return missing(field.name);
  }
  if (any && profile.heads.difficulty.empty()) return missing("difficulty");
  return Ok{};
}

// Weights [heads, head_dim, bits] become [heads, head_dim + 1, bits] with a bias of 0.
void add_bias(std::vector<float>& weights, int64_t head_dim, int64_t bits) {
  if (weights.empty()) return;
  const int64_t own = head_dim * bits, heads = std::ssize(weights) / own;
  std::vector<float> all(static_cast<size_t>(heads * hash_weight_count(head_dim, bits)));
  for (int64_t h = 0; h < heads; ++h) {
    std::copy_n(weights.begin() + h * own, own,
                all.begin() + h * hash_weight_count(head_dim, bits));
  }
  weights = std::move(all);
}

// The larger of the lengths that windows lay between, such as "2048,8192"; 0 where none is said.
Result<int64_t> longest_context(const std::string& text, const std::string& where) {
  int64_t longest = 0;
  for (const char* at = text.data(); at < text.data() + text.size();) {
    int64_t tokens = 0;
    const auto [end, fault] = std::from_chars(at, text.data() + text.size(), tokens);
    const bool ends = end == text.data() + text.size();
    if (fault != std::errc() || tokens <= 0 || (!ends && *end != ',')) {
      return Error{ErrorCode::kBadFile,
                   "expected numbers of tokens with commas between them as \"context\", found \"" +
                       text + "\"",
                   where};
    }
    longest = std::max(longest, tokens);
    at = ends ? end : end + 1;
  }
  return longest;
}

}  // namespace

std::string model_fingerprint(const ModelConfig& c) {
  std::string text = c.architecture;
  for (const int64_t size : {c.num_layers, c.hidden_size, c.num_q_heads, c.num_kv_heads, c.head_dim,
                             c.intermediate_size, c.vocab_size}) {
    text += "-" + std::to_string(size);
  }
  return text + "-" + describe_rope(c.rope);
}

Result<HeadProfile> load_profile(const std::filesystem::path& path, const ModelConfig& c,
                                 int32_t code_bits) {
  CLO_ASSIGN(Profile profile, load_whole_profile(path, c));
  if (profile.code_bits != 0 && profile.code_bits != code_bits) {
    const std::string bits = std::to_string(profile.code_bits);
    return Error{ErrorCode::kBadFile,
                 "expected hash weights of " + std::to_string(code_bits) +
                     " bits, as --bits says, found " + bits + " bits: use --bits " + bits +
                     ", or a profile made with --bits " + std::to_string(code_bits),
                 path.string()};
  }
  return std::move(profile.heads);
}

Result<Profile> load_whole_profile(const std::filesystem::path& path, const ModelConfig& c) {
  CLO_ASSIGN(const SafetensorsFile file, SafetensorsFile::open(path));
  return read_profile(file, c);
}

Result<Profile> read_profile(const SafetensorsFile& file, const ModelConfig& c) {
  const std::string& where = file.where();
  const auto entry = [&](const char* key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? std::string() : found->second;
  };
  const bool is_old = std::ranges::find(kOldFormats, entry("format")) != std::end(kOldFormats);
  if (!is_old && entry("format") != kFormat) {
    return Error{ErrorCode::kBadFile,
                 std::string("expected a profile of format \"") + kFormat +
                     "\" or older, found \"" + entry("format") +
                     "\": make it again with clo profile",
                 where};
  }
  if (entry("model") != model_fingerprint(c)) {
    return Error{ErrorCode::kBadFile,
                 "the profile was made for model \"" + entry("model") + "\", this model is \"" +
                     model_fingerprint(c) + "\"",
                 where};
  }
  Profile profile;
  profile.facts = file.metadata();
  CLO_ASSIGN(profile.heads.importance,
             read_tensor(file, "importance", {c.num_layers, c.num_q_heads}, where));
  CLO_ASSIGN(profile.heads.difficulty,
             read_tensor(file, "difficulty", {c.num_layers, c.num_kv_heads}, where));
  const auto hash = file.tensors().find("hash_weights");
  const bool has_hash = hash != file.tensors().end();
  const int64_t bits = has_hash && !hash->second.shape.empty() ? hash->second.shape.back() : 0;
  const bool known = bits > 0 && bits <= kMaxCodeBits && bits % 64 == 0;
  if (known) profile.code_bits = static_cast<int32_t>(bits);
  CLO_ASSIGN(
      profile.heads.hash_weights,
      read_tensor(file, "hash_weights",
                  {c.num_layers, c.num_kv_heads, c.head_dim + (is_old ? 0 : 1), known ? bits : 128},
                  where));
  if (is_old) add_bias(profile.heads.hash_weights, c.head_dim, bits);
  if (!profile.heads.hash_weights.empty()) {
    CLO_ASSIGN(profile.heads.hash_tokens, longest_context(entry("context"), where));
  }
  CLO_TRY(check_shares("importance", profile.heads.importance, where));
  KvShape shape;
  shape.num_layers = static_cast<int32_t>(c.num_layers);
  shape.num_q_heads = static_cast<int32_t>(c.num_q_heads);
  shape.num_kv_heads = static_cast<int32_t>(c.num_kv_heads);
  const std::vector<ProfileField> fields = statistics_fields(profile.statistics, shape);
  for (const ProfileField& field : fields) {
    CLO_ASSIGN(*field.values, read_tensor(file, field.name, field.shape, where));
    const std::string name = field.name;
    if (name.starts_with("trial_")) CLO_TRY(check_shares(field.name, *field.values, where));
  }
  CLO_TRY(check_complete(profile, fields, where));
  return profile;
}

std::string profile_bytes(const Profile& profile, const ModelConfig& c) {
  std::vector<NewTensor> tensors;
  const auto add = [&](const char* name, const std::vector<float>& values, Shape shape,
                       DType type) {
    if (!values.empty()) tensors.push_back({name, std::move(shape), values, type});
  };
  add("importance", profile.heads.importance, {c.num_layers, c.num_q_heads}, DType::kF32);
  add("difficulty", profile.heads.difficulty, {c.num_layers, c.num_kv_heads}, DType::kF32);
  HeadStatistics statistics = profile.statistics;
  KvShape shape;
  shape.num_layers = static_cast<int32_t>(c.num_layers);
  shape.num_q_heads = static_cast<int32_t>(c.num_q_heads);
  shape.num_kv_heads = static_cast<int32_t>(c.num_kv_heads);
  for (const ProfileField& field : statistics_fields(statistics, shape)) {
    add(field.name, *field.values, field.shape, DType::kF32);
  }
  add("hash_weights", profile.heads.hash_weights,
      {c.num_layers, c.num_kv_heads, c.head_dim + 1, profile.code_bits}, DType::kBF16);
  std::map<std::string, std::string> metadata = profile.facts;
  metadata["format"] = kFormat;
  metadata["model"] = model_fingerprint(c);
  return safetensors_bytes(tensors, metadata);
}

}  // namespace clo
