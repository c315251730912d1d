#pragma once
// The metadata of a GGUF file as the readers of its tokenizer ask for it. Not for use outside the
// room.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clo/result.h"
#include "io/gguf.h"

namespace clo {

inline Error bad_gguf(const GgufFile& file, std::string message) {
  return Error{ErrorCode::kBadFile, std::move(message), file.where()};
}

inline bool gguf_has(const GgufFile& file, const std::string& key) {
  return file.metadata().contains(key);
}

// The list of one kind under a key. Fails: kBadFile when it is absent or of another kind.
template <typename T>
Result<const std::vector<T>*> gguf_list(const GgufFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found != file.metadata().end()) {
    if (const GgufArray* array = std::get_if<GgufArray>(&found->second)) {
      if (const auto* values = std::get_if<std::vector<T>>(array)) return values;
    }
  }
  return bad_gguf(file, "metadata \"" + key + "\" is missing or of another kind, expected a list");
}

// A truth value, or `otherwise` where the key is absent. Fails: kBadFile for another kind.
Result<bool> gguf_flag(const GgufFile& file, const std::string& key, bool otherwise);

// The id under a key, nothing where there is none. Fails: kBadFile when it is not below
// `num_tokens`.
Result<std::optional<int32_t>> gguf_token_id(const GgufFile& file, const std::string& key,
                                             size_t num_tokens);

}  // namespace clo
