#include "base/utf8.h"

namespace clo {

Utf8Step decode_utf8(std::string_view bytes) {
  using Kind = Utf8Step::Kind;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {Kind::kCodePoint, lead, 1};

  size_t length = 0;
  unsigned char second_low = 0x80, second_high = 0xBF;
  char32_t code_point = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    code_point = lead & 0x1F;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    code_point = lead & 0x0F;
    if (lead == 0xE0) second_low = 0xA0;   // overlong
    if (lead == 0xED) second_high = 0x9F;  // surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    code_point = lead & 0x07;
    if (lead == 0xF0) second_low = 0x90;   // overlong
    if (lead == 0xF4) second_high = 0x8F;  // beyond U+10FFFF
  } else {
    return {Kind::kInvalid, 0, 1};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Kind::kIncomplete, 0, i};
    const unsigned char low = i == 1 ? second_low : 0x80;
    const unsigned char high = i == 1 ? second_high : 0xBF;
    if (byte(i) < low || byte(i) > high) return {Kind::kInvalid, 0, i};
    code_point = (code_point << 6) | (byte(i) & 0x3F);
  }
  return {Kind::kCodePoint, code_point, length};
}

size_t find_invalid_utf8(std::string_view bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    const Utf8Step step = decode_utf8(bytes.substr(at));
    if (step.kind != Utf8Step::Kind::kCodePoint) return at;
    at += step.length;
  }
  return at;
}

void append_utf8(char32_t c, std::string& out) {
  const auto put = [&](char32_t bits) { out += static_cast<char>(bits); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | (c >> 6));
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3F));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

}  // namespace clo
