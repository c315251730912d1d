// Any bytes as a profile of a small model: what is accepted has the model's shapes and finite
// values, shares in [0, 1], and comes back the same when it is written and read again.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "profile/profile_file.h"
#include "profile_model.h"
#include "safetensors_mutation.h"

namespace {

void check_values(const std::vector<float>& values, int64_t wanted) {
  CLO_CHECK(values.empty() || std::ssize(values) == wanted, values.size(), wanted);
  for (const float value : values) CLO_CHECK(std::isfinite(value), value);
}
void check_shares(const std::vector<float>& values) {
  for (const float value : values) CLO_CHECK(value >= 0 && value <= 1, value);
}

std::vector<clo::ProfileField> fields_of(clo::Profile& profile) {
  const clo::ModelConfig model = clo::profile_model();
  clo::KvShape shape;
  shape.num_layers = static_cast<int32_t>(model.num_layers);
  shape.num_q_heads = static_cast<int32_t>(model.num_q_heads);
  shape.num_kv_heads = static_cast<int32_t>(model.num_kv_heads);
  return clo::statistics_fields(profile.statistics, shape);
}

void check_profile(clo::Profile& profile) {
  const clo::ModelConfig model = clo::profile_model();
  const int64_t heads = model.num_layers * model.num_kv_heads;
  check_values(profile.heads.importance, model.num_layers * model.num_q_heads);
  check_shares(profile.heads.importance);
  check_values(profile.heads.difficulty, heads);
  CLO_CHECK(profile.code_bits >= 0 && profile.code_bits <= clo::kMaxCodeBits &&
            profile.code_bits % 64 == 0);
  CLO_CHECK((profile.code_bits > 0) == !profile.heads.hash_weights.empty());
  check_values(profile.heads.hash_weights,
               heads * clo::hash_weight_count(model.head_dim, profile.code_bits));
  for (const clo::ProfileField& field : fields_of(profile)) {
    int64_t wanted = 1;
    for (const int64_t extent : field.shape) wanted *= extent;
    check_values(*field.values, wanted);
  }
}

// Weights are written in bf16, which has no room for the largest floats.
bool can_be_written(const clo::Profile& profile) {
  return std::all_of(profile.heads.hash_weights.begin(), profile.heads.hash_weights.end(),
                     [](float value) { return std::abs(value) < 3e38f; });
}

void check_round_trip(clo::Profile& profile) {
  const clo::ModelConfig model = clo::profile_model();
  const std::string bytes = clo::profile_bytes(profile, model);
  const auto file = clo::SafetensorsFile::parse(std::as_bytes(std::span(bytes)), "again");
  CLO_CHECK(file.has_value());
  auto again = clo::read_profile(*file, model);
  CLO_CHECK(again.has_value());
  CLO_CHECK(again->heads.importance == profile.heads.importance);
  CLO_CHECK(again->heads.difficulty == profile.heads.difficulty);
  CLO_CHECK(again->code_bits == profile.code_bits);
  const auto before = fields_of(profile), after = fields_of(*again);
  for (size_t i = 0; i < before.size(); ++i) {
    CLO_CHECK(*before[i].values == *after[i].values, before[i].name);
  }
  for (const auto& [name, value] : profile.facts) {
    CLO_CHECK(name == "format" || again->facts.at(name) == value, name);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = clo::SafetensorsFile::parse(std::as_bytes(std::span(data, size)), "input");
  if (!file) return 0;  // safetensors_fuzzer has those
  auto profile = clo::read_profile(*file, clo::profile_model());
  if (!profile) {
    CLO_CHECK(!profile.error().message.empty() && profile.error().where == "input");
    return 0;
  }
  // A tensor that is there is read or refused, never passed over for its type.
  for (const auto& [name, type] : file->unsupported_tensors()) {
    CLO_CHECK(name != "importance" && name != "difficulty" && name != "hash_weights", name, type);
    for (const clo::ProfileField& field : fields_of(*profile)) CLO_CHECK(name != field.name, name);
  }
  check_profile(*profile);
  if (can_be_written(*profile)) check_round_trip(*profile);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr std::array<std::string_view, 8> kFragments = {
      R"("importance":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)",
      R"("importance":{"dtype":"I8","shape":[1,2],"data_offsets":[0,2]},)",
      R"("difficulty":{"dtype":"F16","shape":[1,1],"data_offsets":[0,2]},)",
      R"("hash_weights":{"dtype":"BF16","shape":[1,1,5,64],"data_offsets":[0,640]},)",
      R"("hash_weights":{"dtype":"BF16","shape":[64],"data_offsets":[0,128]},)",
      R"("set_overlap":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},)",
      R"("recall_random":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},)",
      R"("more":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"};
  return clo::mutate_safetensors(data, size, max_size, seed, kFragments);
}
