#include "text/bpe.h"

#include <algorithm>
#include <climits>

#include "base/check.h"

namespace clo {

namespace {

// std::push_heap keeps the largest on top; the best merge has the lowest rank, then position.
bool worse(const BpeMerger::Scratch::Candidate& a, const BpeMerger::Scratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
}

}  // namespace

bool BpeMerger::add_merge(int32_t left, int32_t right, int32_t merged) {
  const auto rank = static_cast<uint32_t>(merges_.size());
  return merges_.emplace(pair_key(left, right), Merge{rank, merged}).second;
}

void BpeMerger::consider(int32_t position, Scratch& scratch) const {
  const Scratch::Symbol& left = scratch.symbols[static_cast<size_t>(position)];
  if (left.next < 0) return;
  const Scratch::Symbol& right = scratch.symbols[static_cast<size_t>(left.next)];
  const auto found = merges_.find(pair_key(left.token, right.token));
  if (found == merges_.end()) return;
  scratch.heap.push_back({found->second.rank, position, found->second.merged});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), worse);
}

void BpeMerger::encode(std::string_view word, Scratch& scratch,
                       std::vector<int32_t>& tokens) const {
  CLO_CHECK(word.size() < INT32_MAX, word.size());
  scratch.symbols.clear();
  for (const char byte : word) {
    const int32_t token = byte_tokens_[static_cast<unsigned char>(byte)];
    if (token >= 0) scratch.symbols.push_back({token, -1, -1});
  }
  run(scratch, tokens);
}

void BpeMerger::merge(std::span<const int32_t> start, Scratch& scratch,
                      std::vector<int32_t>& tokens) const {
  CLO_CHECK(start.size() < INT32_MAX, start.size());
  scratch.symbols.clear();
  for (const int32_t token : start) scratch.symbols.push_back({token, -1, -1});
  run(scratch, tokens);
}

void BpeMerger::run(Scratch& scratch, std::vector<int32_t>& tokens) const {
  auto& symbols = scratch.symbols;
  if (symbols.empty()) return;
  const auto size = static_cast<int32_t>(symbols.size());
  for (int32_t i = 0; i < size; ++i) {
    symbols[static_cast<size_t>(i)].previous = i - 1;
    symbols[static_cast<size_t>(i)].next = i + 1 < size ? i + 1 : -1;
  }
  scratch.heap.clear();
  for (int32_t i = 0; i + 1 < size; ++i) consider(i, scratch);

  while (!scratch.heap.empty()) {
    std::pop_heap(scratch.heap.begin(), scratch.heap.end(), worse);
    const Scratch::Candidate best = scratch.heap.back();
    scratch.heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<size_t>(best.position)];
    if (left.token < 0 || left.next < 0) continue;
    Scratch::Symbol& right = symbols[static_cast<size_t>(left.next)];
    // A candidate is stale once a neighbour has changed; what counts is that the pair now standing
    // here still merges into the same token.
    const auto found = merges_.find(pair_key(left.token, right.token));
    if (found == merges_.end() || found->second.merged != best.merged) continue;

    left.token = best.merged;
    left.next = right.next;
    right.token = -1;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].previous = best.position;
    if (left.previous >= 0) consider(left.previous, scratch);
    consider(best.position, scratch);
  }
  for (int32_t i = 0; i >= 0 && i < size; i = symbols[static_cast<size_t>(i)].next)
    tokens.push_back(symbols[static_cast<size_t>(i)].token);
}

}  // namespace clo
