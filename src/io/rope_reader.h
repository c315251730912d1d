#pragma once
// Reads the rotary settings of a config.json. Both spellings are known: rope_theta + rope_scaling
// (transformers 4) and rope_parameters (transformers 5).
#include <cstdint>

#include "clo/result.h"
#include "io/json_object.h"
#include "io/rope.h"

namespace clo {

// The settings in force. `max_positions` is the default of original_max_position_embeddings.
// Fails: kUnsupported for a scaling type or key other than those of RopeConfig, kBadFile for a
// value of the wrong type or out of range.
Result<RopeConfig> read_rope(const JsonObject& config, int64_t max_positions);

}  // namespace clo
