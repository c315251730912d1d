#pragma once
// The byte-level tokenizer of a GGUF file in the words of tokenizer.json, which the one reader of
// tokenizers takes: vocabulary, merges, special tokens, split pattern by the name that the file
// gives it. Unknown patterns are refused by name. Vocabularies with scores cannot be said in those
// words: text/gguf_pieces.h reads them.
#include <string>

#include "clo/result.h"
#include "io/gguf.h"
#include "text/tokenizer_config.h"

namespace clo {

// Fails: kUnsupported for another kind of tokenizer or an unknown pattern, kBadFile for missing or
// malformed metadata.
Result<std::string> gguf_tokenizer_json(const GgufFile& file);

// Whether the file brings a tokenizer at all.
bool gguf_has_tokenizer(const GgufFile& file);

// Special tokens and the chat template; nothing where the file brings no tokenizer. Fails:
// kBadFile.
Result<TokenizerConfig> gguf_tokenizer_config(const GgufFile& file);

}  // namespace clo
