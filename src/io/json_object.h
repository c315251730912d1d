#pragma once
// JsonObject: typed reads from a JSON object that came from outside. A key that is absent or null
// gives nothing; a value of another type is refused by key, never converted.
// Cheap to copy: objects inside share the document of the outermost.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"

namespace clo {

class JsonObject {
 public:
  // Fails: kBadFile for invalid JSON (with the byte), nesting beyond 64, a key that occurs twice in
  // one object, or a value that is no object; `where` names the text in messages.
  static Result<JsonObject> parse(std::string_view text, std::string where);

  // Reads and parses a file of at most `max_bytes`.
  // Fails: kBadFile as parse(), or when the file cannot be read or is larger.
  static Result<JsonObject> read(const std::filesystem::path& path, int64_t max_bytes);

  // Whether the key is there with a value other than null.
  bool has(const std::string& key) const;
  std::vector<std::string> keys() const;

  // All of these fail with kBadFile when the value has another type, naming key and value.
  Result<std::optional<int64_t>> integer(const std::string& key) const;
  Result<std::optional<double>> number(const std::string& key) const;  // finite
  Result<std::optional<bool>> boolean(const std::string& key) const;
  Result<std::optional<std::string>> text(const std::string& key) const;
  Result<std::optional<std::vector<std::string>>> texts(const std::string& key) const;
  // A list of integers, or one integer.
  Result<std::optional<std::vector<int64_t>>> integers(const std::string& key) const;
  Result<std::optional<JsonObject>> object(const std::string& key) const;

  const std::string& where() const { return where_; }
  // "rope_scaling.factor" for key "factor" of the object under "rope_scaling".
  std::string full_key(const std::string& key) const { return prefix_ + key; }

 private:
  struct Node;
  JsonObject(std::shared_ptr<const Node> node, std::string where, std::string prefix)
      : node_(std::move(node)), where_(std::move(where)), prefix_(std::move(prefix)) {}
  Error wrong_type(const std::string& key, std::string_view expected) const;

  std::shared_ptr<const Node> node_;
  std::string where_;
  std::string prefix_;
};

}  // namespace clo
