#pragma once
// Added tokens: strings such as <|im_start|> that are found in the text before anything else and
// become one id each. Filled while a tokenizer file is read, immutable afterwards; split() is const
// and thread-safe. Follows the AddedVocabulary of Hugging Face tokenizers.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace clo {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;  // only between characters that are not part of a word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // searched in the normalised text, else in the text as given
  bool special = false;
};

// Finds the added tokens of one kind (normalised or not) in a text.
class AddedTokenFinder {
 public:
  // `pattern` is what to look for: the content, normalised when the kind asks for it. The first of
  // two equal patterns wins. Requires: !pattern.empty().
  void add(std::string_view pattern, const AddedToken& token);

  struct Section {
    std::string_view text;  // of plain text; of a token, what it covers
    int32_t id = -1;        // -1: plain text
  };
  // Appends the sections of `text` in order: at each place the longest pattern wins. Special tokens
  // stay plain text unless parse_special.
  void split(std::string_view text, bool parse_special, std::vector<Section>& sections) const;

  bool empty() const { return nodes_.size() == 1; }

 private:
  struct Node {
    std::map<unsigned char, uint32_t> next;
    const AddedToken* token = nullptr;
  };
  // The longest pattern at the front of `rest`; its length is put into `length`.
  const AddedToken* longest(std::string_view rest, size_t& length) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::vector<bool> starts_ = std::vector<bool>(256);  // first bytes of patterns
};

}  // namespace clo
