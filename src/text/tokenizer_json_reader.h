#pragma once
// The reader of a Hugging Face tokenizer.json: every object of the file either changes the result
// in a way that is implemented, or is known not to, or is refused by name. One object reads one
// file. Vocabulary, merges and added tokens are in tokenizer_json.cpp, the stages round them
// (normaliser, pre-tokenizer, post-processor, decoder) in tokenizer_json_stages.cpp.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "text/tokenizer_parts.h"

namespace clo {

class TokenizerJsonReader {
 public:
  using Json = nlohmann::json;
  // Requires: both outlive this object.
  TokenizerJsonReader(const Json& root, const std::string& where) : root_(root), where_(where) {}

  Result<std::unique_ptr<TokenizerParts>> run();

 private:
  // The value under a key; null when there is none or `object` is no object.
  static const Json& member(const Json& object, const char* key);
  // A value for messages, cut at 80 bytes.
  static std::string shown(const Json& value);
  Error bad(const std::string& message) const;
  Error unsupported(const std::string& what, const std::string& instead) const;
  Result<bool> flag(const Json& object, const char* key, bool otherwise) const;
  Result<std::string> type_of(const Json& object, const char* part) const;
  Result<int32_t> id_of(const Json& value, const std::string& token) const;
  // A literal text under a key, not empty.
  Result<std::string> text_of(const Json& object, const char* key, const char* part) const;
  // The list of a Sequence, with its nesting bounded.
  Result<const Json*> list(const Json& object, const char* key, int depth) const;

  Status read_model(const Json& model);
  Status read_byte_tokens(const Json& model);
  Status read_character_rules(const Json& model);
  Status read_merges(const Json& merges);
  Error bad_merge(size_t index, const Json& merge, const std::string& why) const;
  Status add_token(const std::string& spelling, int32_t id, std::string bytes);
  Status read_added_tokens(const Json& list_value);
  Status check_spread(int64_t largest, size_t count) const;

  Status read_normalizer(const Json& value, int depth);
  Status read_pre_tokenizer(const Json& value, int depth);
  Status read_split(const Json& value);
  Status read_metaspace(const Json& value);
  Status add_split(Result<SplitPattern> pattern);
  Status read_post_processor(const Json& value, int depth);
  Status append_special(const Json& special, const Json& processor, std::vector<int32_t>& ids);
  Status read_decoder(const Json& value, int depth);
  Status read_byte_level_decoder(const std::string& type);
  Status read_character_decoder(const std::string& type, const Json& value);
  // A Replace of a literal text: what is replaced and by what.
  Result<std::pair<std::string, std::string>> read_replace(const Json& value,
                                                           const char* part) const;
  // The text of each token after the decoder's replacements.
  void decode_tokens();

  const Json& root_;
  const std::string& where_;
  std::unique_ptr<TokenizerParts> parts_ = std::make_unique<TokenizerParts>();
  bool byte_level_seen_ = false;
  // Of the decoder, in the order in which its stages must come.
  bool byte_level_decoder_ = false;
  std::vector<std::pair<std::string, std::string>> replacements_;
  bool byte_fallback_decoder_ = false, fuse_seen_ = false, strip_seen_ = false;
};

}  // namespace clo
