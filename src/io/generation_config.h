#pragma once
// GenerationConfig: the sampling defaults a model ships in generation_config.json. Values are
// checked for range; keys this engine has no setting for are not read. Plain values.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"
#include "io/model_config.h"

namespace clo {

struct GenerationConfig {
  std::vector<int32_t> eos_ids;  // of this file when it names any, else of config.json
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<int32_t> top_k;  // 0 means all tokens
  std::optional<bool> do_sample;
};

// Reads generation_config.json of a model directory; without that file only eos_ids are set.
// Fails: kBadFile for a malformed file or a value of the wrong type or out of range, naming the
// key.
Result<GenerationConfig> load_generation_config(const std::filesystem::path& model_dir,
                                                const ModelConfig& config);

// The same for text; `where` names it in messages. Fails: as load_generation_config().
Result<GenerationConfig> parse_generation_config(std::string_view json, std::string where,
                                                 const ModelConfig& config);

}  // namespace clo
