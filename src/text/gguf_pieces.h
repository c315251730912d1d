#pragma once
// The tokenizer of a GGUF file whose vocabulary is a SentencePiece BPE model ("llama" in its
// words): pieces with scores and types. Merging goes by score (text/piece_merger.h); the rest is as
// in the tokenizer.json that such models come with: special tokens are found first, and each text
// between them gets a space in front unless the file says otherwise.
#include <memory>

#include "clo/result.h"
#include "io/gguf.h"
#include "text/tokenizer_parts.h"

namespace clo {

// Requires: tokenizer.ggml.model is "llama". Fails: kBadFile for missing or malformed metadata,
// kUnsupported for a normaliser that is not known.
Result<std::unique_ptr<TokenizerParts>> read_gguf_pieces(const GgufFile& file);

}  // namespace clo
