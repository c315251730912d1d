#pragma once
// What a tokenizer.json says, in the form encode() and decode() need. Built by read_tokenizer_json
// (tokenizer_json.cpp), then owned and never changed by a Tokenizer. Not for use outside the room.
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "clo/result.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/split_pattern.h"
#include "text/unicode.h"

namespace clo {

struct TokenizerParts {
  struct Token {
    std::string bytes;
    bool present = false;
    bool special = false;
  };
  struct StringHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  std::vector<Token> tokens;  // by id
  // Spelling in the file -> id.
  std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>> ids;
  BpeMerger bpe;
  bool ignore_merges = false;  // a word that is a token is not merged up from its bytes

  std::deque<AddedToken> added;    // addresses stay valid: the finders keep them
  AddedTokenFinder raw_finder;     // searched in the text as given
  AddedTokenFinder normal_finder;  // searched in the normalised text
  std::vector<NormalForm> normal_forms;
  std::vector<SplitPattern> splits;  // applied one after the other
  bool add_prefix_space = false;
  // Splits before this index run before the prefix space is added, the rest after it.
  size_t splits_before_prefix_space = 0;
  std::vector<int32_t> prefix, suffix;  // what the post-processor adds
  int32_t num_dropped_bytes = 0;        // bytes without a token
  std::string post_processor = "none";  // its name, for description()

  bool contains(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < tokens.size() &&
           tokens[static_cast<size_t>(id)].present;
  }
};

// Fails: kBadFile, kUnsupported; see Tokenizer::parse.
Result<std::unique_ptr<TokenizerParts>> read_tokenizer_json(std::string_view text,
                                                            const std::string& where);

}  // namespace clo
