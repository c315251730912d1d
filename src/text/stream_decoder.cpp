#include "text/stream_decoder.h"

#include "base/utf8.h"

namespace clo {

std::string StreamDecoder::push(TokenId id) {
  if (skip_special_ && tokenizer_->is_special(id)) return "";
  held_ += tokenizer_->decode_bytes(id);
  std::string text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Step step = decode_utf8(rest);
    if (step.kind == Utf8Step::Kind::kIncomplete) break;
    text += step.kind == Utf8Step::Kind::kCodePoint ? rest.substr(0, step.length)
                                                    : kReplacementCharacter;
    rest.remove_prefix(step.length);
  }
  held_.erase(0, held_.size() - rest.size());
  return text;
}

std::string StreamDecoder::flush() {
  const bool left = !held_.empty();
  held_.clear();
  return left ? std::string(kReplacementCharacter) : std::string();
}

}  // namespace clo
