#pragma once
// Token ids in configuration files: one integer or a list.
#include <cstdint>
#include <string>
#include <vector>

#include "clo/result.h"
#include "io/json_object.h"

namespace clo {

// The ids under `key`; empty when it is absent or null.
// Fails: kBadFile for another type, an id outside [0, vocab_size), or more than 1,024 ids.
Result<std::vector<int32_t>> read_token_ids(const JsonObject& object, const std::string& key,
                                            int64_t vocab_size);

}  // namespace clo
