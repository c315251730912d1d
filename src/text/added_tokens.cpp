#include "text/added_tokens.h"

#include <algorithm>

#include "base/check.h"
#include "base/utf8.h"
#include "text/unicode.h"

namespace clo {

namespace {

// The last character of a non-empty valid text.
Utf8Step last_character(std::string_view text) {
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  return decode_utf8(text.substr(start));
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word_character(last_character(text).code_point);
}

bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word_character(decode_utf8(text).code_point);
}

size_t leading_space(std::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const Utf8Step step = decode_utf8(text.substr(length));
    if (!is_white_space(step.code_point)) break;
    length += step.length;
  }
  return length;
}

size_t trailing_space(std::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const Utf8Step step = last_character(text.substr(0, text.size() - length));
    if (!is_white_space(step.code_point)) break;
    length += step.length;
  }
  return length;
}

}  // namespace

void AddedTokenFinder::add(std::string_view pattern, const AddedToken& token) {
  CLO_CHECK(!pattern.empty(), token.id);
  starts_[static_cast<unsigned char>(pattern[0])] = true;
  uint32_t node = 0;
  for (const char c : pattern) {
    const auto byte = static_cast<unsigned char>(c);
    const auto found = nodes_[node].next.find(byte);
    if (found != nodes_[node].next.end()) {
      node = found->second;
      continue;
    }
    const auto fresh = static_cast<uint32_t>(nodes_.size());
    nodes_[node].next.emplace(byte, fresh);
    nodes_.emplace_back();
    node = fresh;
  }
  if (nodes_[node].token == nullptr) nodes_[node].token = &token;
}

const AddedToken* AddedTokenFinder::longest(std::string_view rest, size_t& length) const {
  const AddedToken* best = nullptr;
  uint32_t node = 0;
  for (size_t i = 0; i < rest.size(); ++i) {
    const auto found = nodes_[node].next.find(static_cast<unsigned char>(rest[i]));
    if (found == nodes_[node].next.end()) break;
    node = found->second;
    if (nodes_[node].token != nullptr) {
      best = nodes_[node].token;
      length = i + 1;
    }
  }
  return best;
}

void AddedTokenFinder::split(std::string_view text, bool parse_special,
                             std::vector<Section>& sections) const {
  size_t done = 0;  // everything before is in sections
  size_t at = 0;
  while (at < text.size()) {
    size_t length = 0;
    const AddedToken* token = nullptr;
    if (starts_[static_cast<unsigned char>(text[at])]) token = longest(text.substr(at), length);
    if (token == nullptr) {
      ++at;
      continue;
    }
    // A match that is turned down still covers its characters: no other token starts inside it.
    size_t begin = at;
    size_t end = at + length;
    at = end;
    if (token->special && !parse_special) continue;
    if (token->single_word &&
        (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end))))
      continue;
    if (token->lstrip) begin = std::max(begin - trailing_space(text.substr(0, begin)), done);
    if (token->rstrip) end += leading_space(text.substr(end));
    if (begin > done) sections.push_back({text.substr(done, begin - done), -1});
    sections.push_back({text.substr(begin, end - begin), token->id});
    done = end;
  }
  if (done < text.size()) sections.push_back({text.substr(done), -1});
}

}  // namespace clo
