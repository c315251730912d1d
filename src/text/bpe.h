#pragma once
// Byte-pair merging of one word. Starts from one token a byte (or from any given tokens) and
// applies merges, lowest rank first and leftmost first among equals, as Hugging Face tokenizers
// does. A heap of candidate merges keeps a word of n tokens at O(n log n). Immutable after
// construction; encode() is thread-safe as long as each thread brings its own Scratch.
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace clo {

class BpeMerger {
 public:
  // The token of each byte, -1 for bytes that have none: in a word they are passed over.
  using ByteTokens = std::array<int32_t, 256>;

  void set_byte_tokens(const ByteTokens& tokens) { byte_tokens_ = tokens; }
  void reserve(size_t merges) { merges_.reserve(merges); }
  // Adds the merge of the next rank; false when the pair already has one.
  bool add_merge(int32_t left, int32_t right, int32_t merged);
  size_t num_merges() const { return merges_.size(); }

  struct Scratch {
    struct Symbol {
      int32_t token, previous, next;  // token -1: merged into its left neighbour
    };
    struct Candidate {
      uint32_t rank;
      int32_t position;
      int32_t merged;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // Appends the tokens of `word`. Requires: size below 2^31.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& tokens) const;
  // Appends what `start` merges into. Requires: size below 2^31.
  void merge(std::span<const int32_t> start, Scratch& scratch, std::vector<int32_t>& tokens) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t merged;
  };
  struct PairHash {
    size_t operator()(uint64_t key) const {
      key *= 0x9E3779B97F4A7C15u;
      return key ^ (key >> 32);
    }
  };
  static uint64_t pair_key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  void consider(int32_t position, Scratch& scratch) const;
  // Merges scratch.symbols, which hold the tokens alone, and appends what is left.
  void run(Scratch& scratch, std::vector<int32_t>& tokens) const;

  ByteTokens byte_tokens_{};
  std::unordered_map<uint64_t, Merge, PairHash> merges_;
};

}  // namespace clo
