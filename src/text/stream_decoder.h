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
      : tokenizer_(&tokenizer),
        skip_special_(skip_special),
        spaces_to_drop_(tokenizer.decode_rules().leading_spaces) {}

  // The text that `id` completes; valid UTF-8, often empty.
  std::string push(TokenId id);
  // The end of the stream: U+FFFD when half a character is left, else nothing.
  std::string flush();

 private:
  // What can be shown of held_; all of it when no more bytes can join it.
  std::string release(bool all);
  // `text` without the spaces that are dropped from the front of the whole.
  std::string without_leading_spaces(std::string text);

  const Tokenizer* tokenizer_;
  bool skip_special_;
  size_t spaces_to_drop_;  // until the first other character
  std::string held_;
};

}  // namespace clo
