#pragma once
// Finds stop strings in text that arrives in pieces. Text is released as soon as it cannot be part
// of a stop string: only the longest suffix that is a beginning of one is held back. The result
// does not depend on where the pieces are cut. One object a stream; not for several threads.
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace clo {

class StopMatcher {
 public:
  // Empty strings among `stops` are ignored.
  explicit StopMatcher(std::vector<std::string> stops);

  struct Step {
    std::string text;  // released by this piece, never part of the stop string
    bool stopped = false;
    std::string matched;  // the stop string that was found
  };
  // The stop is the one that ends first; of two that end together, the longer. Once stopped, every
  // further step is empty and stopped.
  Step push(std::string_view text);
  // The end of the stream: the text still held back, nothing after a stop.
  std::string flush();

 private:
  // Aho-Corasick: a state is the longest suffix of the text that is a beginning of a stop string.
  struct State {
    std::map<unsigned char, size_t> next;
    size_t fallback = 0;       // the longest proper suffix that is a state
    size_t length = 0;         // bytes of the suffix
    size_t matched_bytes = 0;  // the longest stop string that ends here, 0 for none
  };
  size_t advance(size_t state, unsigned char byte) const;

  std::vector<State> states_;
  size_t state_ = 0;
  std::string held_;  // exactly the suffix that state_ stands for
  bool stopped_ = false;
  std::string matched_;
};

}  // namespace clo
