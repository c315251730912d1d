#pragma once
// Text to token ids and back, for byte-level BPE vocabularies in Hugging Face's tokenizer.json:
// the same ids as the `tokenizers` library. Other kinds (SentencePiece, WordPiece, Unigram) are
// refused by name. Move-only; immutable after load, so const methods may run on any thread.
// It knows no chat format (text/chat_template.h) and no streams (text/stream_decoder.h).
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"

namespace clo {

using TokenId = int32_t;

struct EncodeOptions {
  // Adds what the file's post-processor adds (BOS and the like), unless the text already begins
  // with it. Off for text that came out of a chat template, which writes its own.
  bool add_special_tokens = false;
  // Recognises special tokens written inside the text; off, they are ordinary characters.
  bool parse_special = true;
};

struct TokenizerParts;

class Tokenizer {
 public:
  // Reads tokenizer.json, or the metadata of a GGUF file, and add_bos_token from
  // tokenizer_config.json when that file is present (it counts only when the post-processor adds
  // nothing). Fails: kBadFile for missing or malformed files, kUnsupported for what is not
  // byte-level BPE.
  static Result<Tokenizer> load(const std::filesystem::path& model_dir);
  // The same from the text of a tokenizer.json; `where` names it in errors.
  static Result<Tokenizer> parse(std::string_view tokenizer_json, std::string where);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // The ids of `text`. Fails: kBadRequest when it is not valid UTF-8 (the message gives the byte)
  // or when the split pattern passes its work limit.
  Result<std::vector<TokenId>> encode(std::string_view text, EncodeOptions options = {}) const;

  // The bytes one token stands for, possibly part of a character; of an added token its content;
  // empty for an id that is not in the vocabulary.
  std::string decode_bytes(TokenId id) const;

  // The text of `ids`; what is not valid UTF-8 becomes U+FFFD, unknown ids become nothing.
  std::string decode(std::span<const TokenId> ids, bool skip_special = true) const;

  bool is_special(TokenId id) const;
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
