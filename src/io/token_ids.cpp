#include "io/token_ids.h"

#include <optional>

#include "base/try.h"
#include "io/refusal.h"

namespace clo {

Result<std::vector<int32_t>> read_token_ids(const JsonObject& object, const std::string& key,
                                            int64_t vocab_size) {
  constexpr size_t kMaxIds = 1024;
  CLO_ASSIGN(const std::optional<std::vector<int64_t>> found, object.integers(key));
  std::vector<int32_t> ids;
  if (!found) return ids;
  if (found->size() > kMaxIds) {
    return bad_file(object.where(), "\"" + object.full_key(key) + "\" lists " +
                                        std::to_string(found->size()) + " ids, at most " +
                                        std::to_string(kMaxIds) + " are expected");
  }
  for (const int64_t id : *found) {
    if (id < 0 || id >= vocab_size) {
      return bad_file(object.where(), "\"" + object.full_key(key) + "\" holds " +
                                          std::to_string(id) +
                                          ", which is outside the vocabulary "
                                          "of " +
                                          std::to_string(vocab_size) + " tokens");
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

}  // namespace clo
