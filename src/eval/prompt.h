#pragma once
// Items as one model sees them: the request, its length in tokens, and which tokens are evidence.
// Models without a chat template are given the text as it is. The engine outlives this.
#include <functional>
#include <vector>

#include "clo/engine.h"
#include "eval/item.h"

namespace clo {

// Tokens of an item's prompt, chat template and answer prefix included.
using ItemCounter = std::function<Result<int64_t>(const EvalItem&)>;

class PromptMaker {
 public:
  explicit PromptMaker(const Engine& engine) : engine_(engine) {}

  // Greedy, with the item's stop strings and room for its answer. Policy and measurements are the
  // caller's.
  Request request(const EvalItem& item) const;
  // A conversation of alternating user and assistant turns, the first and the last a user's, as the
  // prompt of `request`.
  void set_turns(const EvalItem& item, const std::vector<std::string>& turns,
                 Request& request) const;
  Result<int64_t> count(const EvalItem& item) const;
  ItemCounter counter() const {
    return [this](const EvalItem& item) { return count(item); };
  }

  // A token at the edge of a span holds bytes of both sides.
  enum class Edges : uint8_t { kIn, kOut };
  // The tokens of `request`'s prompt that hold the spans of `text`, ascending and disjoint. Where a
  // tokenizer changes the text (normalisation), each span is looked for by itself; what cannot be
  // found is left out.
  Result<std::vector<TokenRange>> token_ranges(const Request& request, const std::string& text,
                                               const std::vector<TextSpan>& spans,
                                               Edges edges = Edges::kIn) const;

 private:
  const Engine& engine_;
};

}  // namespace clo
