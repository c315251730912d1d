#pragma once
// What a tokenizer.json or the metadata of a GGUF file says, in the form encode() and decode()
// need. Built by read_tokenizer_json (tokenizer_json.cpp) or read_gguf_pieces (gguf_pieces.cpp),
// then owned and never changed by a Tokenizer. Not for use outside the room.
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
#include "text/normalizer.h"
#include "text/piece_merger.h"
#include "text/split_pattern.h"
#include "text/tokenizer.h"

namespace clo {

// Metaspace of tokenizer.json: spaces become one visible character, which also marks the start of
// a text. Splitting cuts before each such character.
struct Metaspace {
  enum class Prefix { kAlways, kFirst, kNever };  // kFirst: only where the text itself begins
  std::string replacement;
  Prefix prefix = Prefix::kAlways;
  bool split = true;
};

struct TokenizerParts {
  // How a word becomes tokens.
  enum class Kind {
    kByteLevel,   // from the tokens of its bytes, by ranked merges
    kCharacters,  // from the tokens of its characters, by ranked merges
    kPieces       // by the scores of pieces
  };
  struct Token {
    std::string bytes;
    bool present = false;
    bool special = false;
    bool in_model = false;  // listed in the model's vocabulary, not only among added tokens
    bool is_byte = false;   // stands for one byte of a character (kCharacters, kPieces)
  };
  struct StringHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  std::vector<Token> tokens;  // by id
  // Spelling in the file -> id.
  std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>> ids;
  Kind kind = Kind::kByteLevel;
  BpeMerger bpe;               // kByteLevel, kCharacters
  PieceMerger pieces;          // kPieces
  bool ignore_merges = false;  // a word that is a token is not merged up from its parts
  // kCharacters: what a character without a token becomes: the tokens of its bytes; or the unknown
  // token, one for a run of such characters if fuse_unknown; or nothing where there is none.
  bool byte_fallback = false;
  BpeMerger::ByteTokens fallback_tokens{};
  int32_t unknown = -1;
  bool fuse_unknown = false;

  std::deque<AddedToken> added;    // addresses stay valid: the finders keep them
  AddedTokenFinder raw_finder;     // searched in the text as given
  AddedTokenFinder normal_finder;  // searched in the normalised text
  std::vector<NormalizerStep> normalizer;
  std::vector<SplitPattern> splits;    // applied one after the other
  std::optional<Metaspace> metaspace;  // after the splits
  bool add_prefix_space = false;
  // Splits before this index run before the prefix space is added, the rest after it.
  size_t splits_before_prefix_space = 0;
  std::vector<int32_t> prefix, suffix;  // what the post-processor adds
  int32_t num_dropped_bytes = 0;        // bytes without a token
  std::string post_processor = "none";  // its name, for description()
  DecodeRules decode_rules;

  // The token of the model's vocabulary with this spelling, -1 when there is none.
  int32_t model_token(std::string_view spelling) const {
    const auto found = ids.find(spelling);
    return found != ids.end() && tokens[static_cast<size_t>(found->second)].in_model ? found->second
                                                                                     : -1;
  }
  bool contains(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < tokens.size() &&
           tokens[static_cast<size_t>(id)].present;
  }
};

// The byte that "<0x41>" spells, -1 when a token is spelled otherwise.
int byte_of_spelling(std::string_view spelling);

// Sorts the added tokens into the two finders, those of the normalised text by their normalised
// content. Fails: as normalize().
Status build_finders(TokenizerParts& parts);

// Fails: kBadFile, kUnsupported; see Tokenizer::parse.
Result<std::unique_ptr<TokenizerParts>> read_tokenizer_json(std::string_view text,
                                                            const std::string& where);

}  // namespace clo
