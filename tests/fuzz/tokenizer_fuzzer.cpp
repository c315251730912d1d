// Fuzzes the reader of tokenizer.json, and what a tokenizer it accepts does to text.
// Input: a tokenizer.json, optionally followed by a NUL byte and a text to encode.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "base/utf8.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"

#ifdef CLO_FUZZ_PLANTED
// Its name in the trace tells this fault from a real one.
[[noreturn]] __attribute__((noinline)) static void planted_bug() { std::abort(); }
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace clo;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), input.size());
  const auto tokenizer = Tokenizer::parse(input.substr(0, end), "fuzz");
  if (!tokenizer) return 0;
  const std::string_view text = end < input.size() ? input.substr(end + 1) : input.substr(0, 256);
  for (const bool flag : {false, true}) {
    const auto ids = tokenizer->encode(text, {.add_special_tokens = flag, .parse_special = flag});
    if (!ids) continue;
#ifdef CLO_FUZZ_PLANTED
    // No seed has more than one special token in its text.
    const auto special = std::count_if(ids->begin(), ids->end(),
                                       [&](TokenId id) { return tokenizer->is_special(id); });
    if (special >= 4) planted_bug();
#endif
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

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Half the time only the text is changed: nearly every change of the JSON before it is refused.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  const auto* nul = static_cast<uint8_t*>(std::memchr(data, 0, size));
  const size_t head = nul == nullptr ? size : static_cast<size_t>(nul - data) + 1;
  if (seed % 2 == 0 || head >= size || head >= max_size)
    return LLVMFuzzerMutate(data, size, max_size);
  return head + LLVMFuzzerMutate(data + head, size - head, max_size - head);
}
