#pragma once
// Turns a stream of token ids into text as it arrives. A character whose bytes lie in several
// tokens is held back (at most 3 bytes) until it is whole; a sequence that can no longer become one
// turns into U+FFFD at once, so the stream never stalls. All pieces together equal
// Tokenizer::decode of all ids. One object a stream; not for several threads.
#include <string>

#include "text/tokenizer.h"

namespace clo {

class StreamDecoder {
 public:
  // Requires: the tokenizer outlives this object.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  // The text that `id` completes; valid UTF-8, often empty.
  std::string push(TokenId id);
  // The end of the stream: U+FFFD when half a character is left, else nothing.
  std::string flush();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string held_;
};

}  // namespace clo
