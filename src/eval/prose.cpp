#include "eval/prose.h"

#include <algorithm>
#include <set>

#include "eval/words.h"

namespace clo {

std::string_view pick(std::span<const std::string_view> words, ItemRandom& random) {
  return words[random.below(words.size())];
}

std::string prose_sentence(ItemRandom& random) {
  const auto skewed = [&](std::span<const std::string_view> words) {
    const double u = random.uniform();
    return std::string(words[static_cast<size_t>(u * u * static_cast<double>(words.size()))]);
  };
  const auto thing = [&] { return skewed(adjectives()) + " " + skewed(nouns()); };
  static constexpr std::string_view kOpenings[] = {
      "",         "In the morning ", "Every year ", "Near the harbor ", "As the story goes, ",
      "At dusk ", "Now and then ",   "Later "};
  static constexpr std::string_view kEndings[] = {"",
                                                  " before the rain comes",
                                                  " without a word",
                                                  " for the third time",
                                                  " while the others wait",
                                                  " beyond the hills",
                                                  " as it always has",
                                                  " until the evening"};
  std::string text(pick(kOpenings, random));
  text += text.empty() ? "The " : "the ";
  text += thing() + " " + skewed(verbs()) + " the " + thing();
  if (random.below(3) == 0) text += " and the " + thing() + " " + skewed(verbs()) + " it";
  text += pick(kEndings, random);
  return text + ".";
}

std::string even_sentence(ItemRandom& random) {
  static constexpr std::string_view kPlaces[] = {"beside", "behind", "above", "near", "beyond"};
  const auto thing = [&] {
    return "the " + std::string(pick(adjectives(), random)) + " " +
           std::string(pick(nouns(), random));
  };
  const auto act = [&] { return std::string(pick(verbs(), random)) + " " + thing(); };
  std::string text = "Near " + thing() + " a " + std::string(pick(nouns(), random)) + " " + act() +
                     " and " + act();
  if (random.below(2) == 0) text += " " + std::string(pick(kPlaces, random)) + " " + thing();
  return text + ".";
}

std::string_view noise_line() {
  return "The field is green. The lake is deep. The wind is cold. Now we walk. Soon we rest.";
}

std::string word_pair(ItemRandom& random) {
  std::string text(pick(adjectives(), random));
  return text + "-" + std::string(pick(nouns(), random));
}

std::string digits(ItemRandom& random, int count) {
  std::string text(1, static_cast<char>('1' + random.below(9)));
  while (std::ssize(text) < count) text += static_cast<char>('0' + random.below(10));
  return text;
}

std::string uuid4(ItemRandom& random) {
  std::string text;
  for (int i = 0; i < 32; ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
    const uint64_t digit = i == 12 ? 4 : i == 16 ? 8 + random.below(4) : random.below(16);
    text += "0123456789abcdef"[digit];
  }
  return text;
}

std::string letters(ItemRandom& random, int count, char first) {
  std::string text;
  for (int i = 0; i < count; ++i) text += static_cast<char>(first + random.below(26));
  return text;
}

std::vector<int64_t> distinct_below(int64_t count, int64_t bound, ItemRandom& random) {
  std::set<int64_t> chosen;
  while (std::ssize(chosen) < count) {
    chosen.insert(static_cast<int64_t>(random.below(static_cast<uint64_t>(bound))));
  }
  return {chosen.begin(), chosen.end()};
}

void append_pieces(EvalItem& item, const std::vector<Piece>& pieces, std::string_view between) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i > 0) item.text += between;
    const TextSpan span = append_span(item.text, pieces[i].text);
    if (pieces[i].gold) item.gold.push_back(span);
  }
}

}  // namespace clo
