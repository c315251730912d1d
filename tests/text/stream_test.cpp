#include <random>

#include "base/utf8.h"
#include "golden_files.h"
#include "text/stop_matcher.h"
#include "text/stream_decoder.h"

namespace clo {
namespace {

TEST(StreamDecoder, PiecesJoinToDecode) {
  std::mt19937 random(3);
  std::vector<Tokenizer> tokenizers;
  for (const char* name : kGoldenTokenizers) tokenizers.push_back(golden_tokenizer(name));
  for (const char* name : kLibraryPieces) tokenizers.push_back(library_pieces(name));
  for (const char* name : kScoredPieces) tokenizers.push_back(scored_pieces(name));
  for (const Tokenizer& tokenizer : tokenizers) {
    for (int round = 0; round < 2000; ++round) {
      std::vector<TokenId> ids(random() % 30);
      // The first tokens are single bytes: most sequences are broken UTF-8.
      const int32_t range = round % 2 == 0 ? 270 : tokenizer.vocab_size();
      for (TokenId& id : ids) id = static_cast<TokenId>(random() % range);
      const bool skip = round % 3 == 0;
      StreamDecoder stream(tokenizer, skip);
      std::string text;
      for (const TokenId id : ids) {
        const std::string piece = stream.push(id);
        ASSERT_EQ(find_invalid_utf8(piece), piece.size());
        text += piece;
      }
      text += stream.flush();
      ASSERT_EQ(text, tokenizer.decode(ids, skip)) << tokenizer.description();
    }
  }
}

// The token of one byte, by its spelling in the vocabulary.
TokenId byte_token(const Tokenizer& tokenizer, unsigned char byte) {
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id)
    if (tokenizer.decode_bytes(id) == std::string(1, static_cast<char>(byte))) return id;
  ADD_FAILURE() << "no token for byte " << int{byte};
  return -1;
}

TEST(StreamDecoder, HoldsHalfCharactersAndNoMore) {
  const Tokenizer tokenizer = golden_tokenizer("gpt2");
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(byte_token(tokenizer, 0xF0)), "");
  EXPECT_EQ(stream.push(byte_token(tokenizer, 0x9F)), "");
  EXPECT_EQ(stream.push(byte_token(tokenizer, 0x98)), "");
  EXPECT_EQ(stream.push(byte_token(tokenizer, 0x80)), "\U0001F600");
  // A sequence that cannot be completed is given up at once, and what follows is not lost.
  EXPECT_EQ(stream.push(byte_token(tokenizer, 0xE2)), "");
  EXPECT_EQ(stream.push(byte_token(tokenizer, 'x')), "\uFFFDx");
  EXPECT_EQ(stream.push(byte_token(tokenizer, 0x80)), "\uFFFD");
  EXPECT_EQ(stream.push(byte_token(tokenizer, 0xC3)), "");
  EXPECT_EQ(stream.flush(), "\uFFFD");
  EXPECT_EQ(stream.flush(), "");
}

// The definition: the stop that ends first, the longer of two that end together.
struct Naive {
  std::string text, matched;
};
Naive naive_stop(const std::string& all, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= all.size(); ++end) {
    std::string best;
    for (const std::string& stop : stops)
      if (stop.size() > best.size() && all.substr(0, end).ends_with(stop)) best = stop;
    if (!best.empty()) return {all.substr(0, end - best.size()), best};
  }
  return {all, ""};
}

TEST(StopMatcher, AgreesWithASearchOfTheWholeForAnyCut) {
  std::mt19937 random(11);
  const auto word = [&](size_t least, size_t most) {
    std::string made(least + random() % (most - least + 1), 'a');
    for (char& c : made) c = "aab"[random() % 3];
    return made;
  };
  size_t stopped = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> stops(random() % 4);
    for (std::string& stop : stops) stop = word(0, 6);
    const std::string all = word(0, 24);
    const Naive wanted = naive_stop(all, stops);
    StopMatcher matcher(stops);
    std::string text, matched;
    for (size_t at = 0; at < all.size();) {
      const size_t length = std::min(all.size() - at, size_t{1} + random() % 5);
      const auto step = matcher.push(all.substr(at, length));
      text += step.text;
      matched = step.matched;
      ASSERT_EQ(step.stopped, !step.matched.empty());
      at += length;
    }
    text += matcher.flush();
    ASSERT_EQ(text, wanted.text) << all;
    ASSERT_EQ(matched, wanted.matched) << all;
    stopped += matched.empty() ? 0 : 1;
  }
  EXPECT_GT(stopped, 5000u);
}

TEST(StopMatcher, HoldsBackOnlyWhatMayBecomeAStop) {
  StopMatcher matcher({"\n\nUser:", "###"});
  EXPECT_EQ(matcher.push("Hello").text, "Hello");
  EXPECT_EQ(matcher.push(" there\n").text, " there");
  EXPECT_EQ(matcher.push("friend ##").text, "\nfriend ");
  EXPECT_EQ(matcher.push("x\n\nUs").text, "##x");
  const auto step = matcher.push("er: more");
  EXPECT_TRUE(step.stopped);
  EXPECT_EQ(step.text, "");
  EXPECT_EQ(step.matched, "\n\nUser:");
  EXPECT_EQ(matcher.push("leak").text, "");
  EXPECT_EQ(matcher.flush(), "");
}

TEST(StopMatcher, WithoutStopsNothingIsHeld) {
  StopMatcher matcher({"", ""});
  EXPECT_EQ(matcher.push("abc").text, "abc");
  EXPECT_EQ(matcher.flush(), "");
}

}  // namespace
}  // namespace clo
