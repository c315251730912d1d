#pragma once
// Generated text to hide facts in, and random names and values. Deterministic by the generator.
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eval/item.h"
#include "eval/random.h"

namespace clo {

// One sentence of a small grammar; early words of a list come more often, as in real text.
std::string prose_sentence(ItemRandom& random);
// A sentence of 15 or 19 words, every word of the lists as likely as any.
std::string even_sentence(ItemRandom& random);
// One line of five very short sentences, always the same.
std::string_view noise_line();

std::string word_pair(ItemRandom& random);          // "amber-falcon"
std::string digits(ItemRandom& random, int count);  // the first is not 0
std::string uuid4(ItemRandom& random);
std::string letters(ItemRandom& random, int count, char first);  // from `first` on: 'a' or 'A'

std::string_view pick(std::span<const std::string_view> words, ItemRandom& random);

template <typename T>
void shuffle(std::vector<T>& values, ItemRandom& random) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}
// `count` different numbers below `bound`, ascending. Requires: count <= bound.
std::vector<int64_t> distinct_below(int64_t count, int64_t bound, ItemRandom& random);

// A part of a text; gold parts become the item's evidence.
struct Piece {
  std::string text;
  bool gold = false;
};
// Appends the pieces with `between` them; gold ones are noted.
void append_pieces(EvalItem& item, const std::vector<Piece>& pieces, std::string_view between);

}  // namespace clo
