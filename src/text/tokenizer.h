#pragma once
// Text to token ids and back, for BPE vocabularies: byte-level ones and those made from
// SentencePiece models, in Hugging Face's tokenizer.json (the same ids as the `tokenizers` library)
// or in the metadata of a GGUF file. Other kinds (WordPiece, Unigram) are refused by name.
// Move-only; immutable after load, so const methods may run on any thread. It knows no chat format
// (text/chat_template.h) and no streams (text/stream_decoder.h).
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"
#include "io/model_files.h"

namespace clo {

using TokenId = int32_t;

struct EncodeOptions {
  // Adds what the file's post-processor adds (BOS and the like), unless the text already begins
  // with it. Off for text that came out of a chat template, which writes its own.
  bool add_special_tokens = false;
  // Recognises special tokens written inside the text; off, they are ordinary characters.
  bool parse_special = true;
};

class GgufFile;
struct TokenizerParts;

// How the bytes of tokens become text.
struct DecodeRules {
  // Spaces dropped from the front of a whole text: the encoder put them there.
  size_t leading_spaces = 0;
  // Of a sequence that is no character: one U+FFFD for each byte, or one for the sequence.
  bool replace_each_byte = false;
};

class Tokenizer {
 public:
  // Of a directory reads tokenizer.json, and add_bos_token from tokenizer_config.json when that
  // file is present (it counts only when the post-processor adds nothing); of a GGUF file its
  // metadata. Fails: kBadFile for missing or malformed files, kUnsupported for what is not BPE or
  // has parts that are not known.
  static Result<Tokenizer> load(const ModelFiles& model);
  static Result<Tokenizer> load(const std::filesystem::path& directory);
  // The same from the text of a tokenizer.json; `where` names it in errors.
  static Result<Tokenizer> parse(std::string_view tokenizer_json, std::string where);
  // The same from the metadata of a GGUF file.
  static Result<Tokenizer> from_gguf(const GgufFile& file);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // The ids of `text`. Fails: kBadRequest when it is not valid UTF-8 (the message gives the byte)
  // or when the split pattern passes its work limit.
  Result<std::vector<TokenId>> encode(std::string_view text, EncodeOptions options = {}) const;

  // The bytes one token stands for, possibly part of a character; of an added token its content;
  // empty for an id that is not in the vocabulary.
  std::string decode_bytes(TokenId id) const;

  // The text of `ids`; what is not valid UTF-8 becomes U+FFFD, unknown ids become nothing. As the
  // `tokenizers` library, with two deliberate differences. Where tokens of single bytes spell
  // characters and something broken in one run, the library replaces the whole run; here, as in
  // SentencePiece, the characters stay, so that a stream can show each as soon as it is whole. And
  // added tokens are their content, also those that are looked for in the normalised text.
  std::string decode(std::span<const TokenId> ids, bool skip_special = true) const;

  bool is_special(TokenId id) const;
  // Whether the token's bytes may be part of a character; other tokens are whole text, before which
  // a half character is given up.
  bool may_be_partial(TokenId id) const;
  const DecodeRules& decode_rules() const;
  bool contains(TokenId id) const;
  // The id of a token by its spelling in the file ("<|im_end|>", "Ġthe").
  std::optional<TokenId> find(std::string_view content) const;
  // One past the largest id.
  int32_t vocab_size() const;
  // One line for people: kind, size, split pattern, normaliser, post-processor.
  std::string description() const;

 private:
  explicit Tokenizer(std::unique_ptr<const TokenizerParts> parts);
  std::unique_ptr<const TokenizerParts> parts_;
};

}  // namespace clo
