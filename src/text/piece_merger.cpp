#include "text/piece_merger.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "base/check.h"
#include "base/utf8.h"

namespace clo {

namespace {

// std::push_heap keeps the largest on top.
bool worse(const PieceMerger::Scratch::Candidate& a, const PieceMerger::Scratch::Candidate& b) {
  return a.score != b.score ? a.score < b.score : a.position > b.position;
}

}  // namespace

bool PieceMerger::add(std::string_view text, int32_t token, double score, bool used) {
  CLO_CHECK(!text.empty() && text.size() <= kMaxPieceBytes, text.size());
  CLO_CHECK(!std::isnan(score), token);
  longest_ = std::max(longest_, text.size());
  return pieces_.emplace(text, Piece{token, score, used}).second;
}

void PieceMerger::set_byte_tokens(const std::array<int32_t, 256>& tokens) {
  byte_tokens_ = tokens;
  has_byte_tokens_ = true;
}

void PieceMerger::consider(std::string_view text, int32_t position, Scratch& scratch) const {
  const Scratch::Symbol& left = scratch.symbols[static_cast<size_t>(position)];
  if (left.next < 0) return;
  const int32_t length = left.length + scratch.symbols[static_cast<size_t>(left.next)].length;
  if (static_cast<size_t>(length) > longest_) return;
  const std::string_view both =
      text.substr(static_cast<size_t>(left.begin), static_cast<size_t>(length));
  const auto found = pieces_.find(both);
  if (found == pieces_.end()) return;
  scratch.heap.push_back({found->second.score, position, length});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), worse);
  if (!found->second.used) scratch.parts[both] = static_cast<size_t>(left.length);
}

void PieceMerger::encode(std::string_view text, Scratch& scratch,
                         std::vector<int32_t>& tokens) const {
  CLO_CHECK(text.size() < INT32_MAX, text.size());
  auto& symbols = scratch.symbols;
  symbols.clear();
  scratch.heap.clear();
  scratch.parts.clear();
  for (size_t at = 0; at < text.size();) {
    const size_t length = decode_utf8(text.substr(at)).length;
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back(
        {static_cast<int32_t>(at), static_cast<int32_t>(length), index - 1, index + 1});
    at += length;
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;
  const auto size = static_cast<int32_t>(symbols.size());
  for (int32_t i = 0; i + 1 < size; ++i) consider(text, i, scratch);

  while (!scratch.heap.empty()) {
    std::pop_heap(scratch.heap.begin(), scratch.heap.end(), worse);
    const Scratch::Candidate best = scratch.heap.back();
    scratch.heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<size_t>(best.position)];
    if (left.length == 0 || left.next < 0) continue;
    Scratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    // A candidate is stale once either side has grown or gone.
    if (left.length + right.length != best.length) continue;
    left.length = best.length;
    left.next = right.next;
    right.length = 0;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.position;
    if (left.previous >= 0) consider(text, left.previous, scratch);
    consider(text, best.position, scratch);
  }
  bool after_unknown = false;
  for (int32_t i = 0; i >= 0; i = symbols[static_cast<size_t>(i)].next) {
    const Scratch::Symbol& symbol = symbols[static_cast<size_t>(i)];
    append(text.substr(static_cast<size_t>(symbol.begin), static_cast<size_t>(symbol.length)),
           scratch, after_unknown, tokens);
  }
}

void PieceMerger::append(std::string_view piece, const Scratch& scratch, bool& after_unknown,
                         std::vector<int32_t>& tokens) const {
  const auto found = pieces_.find(piece);
  if (found != pieces_.end() && !found->second.used) {
    // Parts are shorter than the piece, which bounds the depth by kMaxPieceBytes.
    const auto parts = scratch.parts.find(piece);
    if (parts != scratch.parts.end()) {
      append(piece.substr(0, parts->second), scratch, after_unknown, tokens);
      append(piece.substr(parts->second), scratch, after_unknown, tokens);
      return;
    }
  }
  if (found != pieces_.end()) {
    tokens.push_back(found->second.token);
    after_unknown = false;
  } else if (has_byte_tokens_) {
    for (const char byte : piece) tokens.push_back(byte_tokens_[static_cast<unsigned char>(byte)]);
    after_unknown = false;
  } else {
    if (!after_unknown) tokens.push_back(unknown_);
    after_unknown = true;
  }
}

}  // namespace clo
