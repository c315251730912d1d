#include "text/byte_level.h"

#include <array>

#include "base/utf8.h"

namespace clo {

namespace {

struct Alphabet {
  std::array<std::string, 256> spelling;
  // The characters in use lie below U+0144; -1 marks the gaps.
  std::array<int, 0x144> byte_of;
};

const Alphabet& alphabet() {
  static const Alphabet kAlphabet = [] {
    Alphabet made;
    made.byte_of.fill(-1);
    char32_t next_free = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
                             (byte >= 0xAE && byte <= 0xFF);
      const char32_t character = printable ? static_cast<char32_t>(byte) : next_free++;
      append_utf8(character, made.spelling[static_cast<size_t>(byte)]);
      made.byte_of[character] = byte;
    }
    return made;
  }();
  return kAlphabet;
}

}  // namespace

std::string spell_bytes(std::string_view bytes) {
  const Alphabet& table = alphabet();
  std::string spelling;
  spelling.reserve(bytes.size() + bytes.size() / 2);
  for (const char byte : bytes) spelling += table.spelling[static_cast<unsigned char>(byte)];
  return spelling;
}

std::optional<std::string> unspell_bytes(std::string_view spelling) {
  const Alphabet& table = alphabet();
  std::string bytes;
  bytes.reserve(spelling.size());
  while (!spelling.empty()) {
    const Utf8Step step = decode_utf8(spelling);
    if (step.kind != Utf8Step::Kind::kCodePoint || step.code_point >= table.byte_of.size() ||
        table.byte_of[step.code_point] < 0)
      return std::nullopt;
    bytes += static_cast<char>(table.byte_of[step.code_point]);
    spelling.remove_prefix(step.length);
  }
  return bytes;
}

}  // namespace clo
