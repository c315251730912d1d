#pragma once
// SentencePiece's merging for vocabularies that give each piece a score and list no merges. A text
// starts as its characters; of all neighbours that together spell a piece, those of the best score
// merge first, leftmost first among equals. A character that ends up in no piece becomes the tokens
// of its bytes, or the unknown token where there are none. Merges listed in rank order could not
// say this: several pairs may spell one piece, and pieces may share a score. O(n log n) for a text
// of n characters. Immutable after construction; encode() is thread-safe as long as each thread
// brings its own Scratch.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace clo {

class PieceMerger {
 public:
  // Longer pieces are not looked for: they would cost their length at every place of a text.
  static constexpr size_t kMaxPieceBytes = 1024;

  // Adds a piece of text. One that is not `used` takes part in merges, but is taken apart again
  // into what it was last seen to be made of. False when the text is a piece already.
  // Requires: 1 <= text.size() <= kMaxPieceBytes; score is not NaN.
  bool add(std::string_view text, int32_t token, double score, bool used);
  // The tokens of the 256 bytes.
  void set_byte_tokens(const std::array<int32_t, 256>& tokens);
  // What stands for a run of characters without a piece; counts only without byte tokens.
  void set_unknown(int32_t token) { unknown_ = token; }

  struct Scratch {
    struct Symbol {
      int32_t begin, length;  // bytes of the text; length 0: merged into its left neighbour
      int32_t previous, next;
    };
    struct Candidate {
      double score;
      int32_t position;  // of the left symbol
      int32_t length;    // of both together
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
    // Piece that is not used -> bytes of its left part where it was last considered.
    std::unordered_map<std::string_view, size_t> parts;
  };

  // Appends the tokens of `text`. Requires: valid UTF-8, size below 2^31.
  void encode(std::string_view text, Scratch& scratch, std::vector<int32_t>& tokens) const;

 private:
  struct Piece {
    int32_t token;
    double score;
    bool used;
  };
  struct StringHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  void consider(std::string_view text, int32_t position, Scratch& scratch) const;
  void append(std::string_view piece, const Scratch& scratch, bool& after_unknown,
              std::vector<int32_t>& tokens) const;

  std::unordered_map<std::string, Piece, StringHash, std::equal_to<>> pieces_;
  size_t longest_ = 0;
  std::array<int32_t, 256> byte_tokens_{};
  bool has_byte_tokens_ = false;
  int32_t unknown_ = -1;
};

}  // namespace clo
