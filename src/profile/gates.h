#pragma once
// Gates of KV heads as DuoAttention publishes them (full_attention_heads.tsv): a number in [0, 1]
// for each, 1 where a head needs its whole context and 0 where sink and recent tokens do.
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"

namespace clo {

// [num_layers, num_kv_heads], from a line of numbers a layer, parted by tabs or spaces, or from a
// JSON array of arrays. Fails: kBadFile for another shape or a value outside [0, 1], with its
// place.
Result<std::vector<float>> parse_gates(std::string_view text, int64_t num_layers,
                                       int64_t num_kv_heads, const std::string& where);

}  // namespace clo
