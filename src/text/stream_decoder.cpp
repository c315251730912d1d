#include "text/stream_decoder.h"

#include "base/utf8.h"

namespace clo {

std::string StreamDecoder::push(TokenId id) {
  if ((skip_special_ && tokenizer_->is_special(id)) || !tokenizer_->contains(id)) return "";
  if (tokenizer_->may_be_partial(id)) {
    held_ += tokenizer_->decode_bytes(id);
    return without_leading_spaces(release(false));
  }
  return without_leading_spaces(release(true) + tokenizer_->decode_bytes(id));
}

std::string StreamDecoder::flush() { return without_leading_spaces(release(true)); }

std::string StreamDecoder::release(bool all) {
  const bool each_byte = tokenizer_->decode_rules().replace_each_byte;
  std::string text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Step step = decode_utf8(rest);
    if (step.kind == Utf8Step::Kind::kIncomplete && !all) break;
    if (step.kind == Utf8Step::Kind::kCodePoint) {
      text += rest.substr(0, step.length);
    } else {
      for (size_t i = 0; i < (each_byte ? step.length : 1); ++i) text += kReplacementCharacter;
    }
    rest.remove_prefix(step.length);
  }
  held_.erase(0, held_.size() - rest.size());
  return text;
}

std::string StreamDecoder::without_leading_spaces(std::string text) {
  size_t dropped = 0;
  while (spaces_to_drop_ > 0 && dropped < text.size()) {
    if (text[dropped] != ' ') {
      spaces_to_drop_ = 0;
      break;
    }
    --spaces_to_drop_;
    ++dropped;
  }
  return text.substr(dropped);
}

}  // namespace clo
