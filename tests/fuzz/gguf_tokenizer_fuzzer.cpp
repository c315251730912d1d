// Fuzzes the readers of tokenizers in GGUF metadata, and what a tokenizer they accept does to text.
// Input: a .gguf file; its end is also the text to encode.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/utf8.h"
#include "io/gguf.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace clo;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto file = GgufFile::parse(std::as_bytes(std::span(data, size)), "fuzz.gguf");
  if (!file) return 0;
  const auto tokenizer = Tokenizer::from_gguf(*file);
  if (!tokenizer) return 0;
  CLO_CHECK(!tokenizer->description().empty());
  std::string text(input.substr(size - std::min<size_t>(size, 200)));
  // Pieces of the vocabulary, so that merges happen whatever the end of the file holds.
  for (TokenId id = 0; id < std::min(tokenizer->vocab_size(), 64); ++id)
    text += tokenizer->decode_bytes(id);
  while (find_invalid_utf8(text) < text.size()) text.erase(find_invalid_utf8(text), 1);
  for (const bool flag : {false, true}) {
    const auto ids = tokenizer->encode(text, {.add_special_tokens = flag, .parse_special = flag});
    if (!ids) continue;
    StreamDecoder stream(*tokenizer, flag);
    std::string streamed;
    for (const TokenId id : *ids) {
      CLO_CHECK(tokenizer->contains(id), id);
      streamed += stream.push(id);
    }
    streamed += stream.flush();
    CLO_CHECK(streamed == tokenizer->decode(*ids, flag));
    CLO_CHECK(find_invalid_utf8(streamed) == streamed.size());
  }
  return 0;
}
