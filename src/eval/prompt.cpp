#include "eval/prompt.h"

#include <algorithm>

#include "base/try.h"

namespace clo {

Request PromptMaker::request(const EvalItem& item) const {
  Request request;
  set_turns(item, {item.text}, request);
  request.answer_prefix = item.answer_prefix;
  request.max_new_tokens = item.max_new_tokens;
  request.stop = item.stop;
  request.sampling = SamplingOptions{};
  return request;
}

void PromptMaker::set_turns(const EvalItem& item, const std::vector<std::string>& turns,
                            Request& request) const {
  request.messages.clear();
  request.prompt.clear();
  if (engine_.has_chat_template() && !item.raw) {
    for (size_t i = 0; i < turns.size(); ++i) {
      request.messages.push_back({i % 2 == 0 ? "user" : "assistant", turns[i]});
    }
    return;
  }
  for (const std::string& turn : turns) request.prompt += turn + "\n";
}

Result<int64_t> PromptMaker::count(const EvalItem& item) const {
  CLO_ASSIGN(const auto ids, engine_.tokenize(request(item)));
  return std::ssize(ids);
}

Result<std::vector<TokenRange>> PromptMaker::token_ranges(const Request& request,
                                                          const std::string& text,
                                                          const std::vector<TextSpan>& spans,
                                                          Edges edges) const {
  std::vector<TokenRange> ranges;
  if (spans.empty()) return ranges;
  CLO_ASSIGN(const auto ids, engine_.tokenize(request));
  std::string bytes;
  std::vector<size_t> ends;  // of each token in `bytes`
  for (const int32_t id : ids) {
    bytes += engine_.token_bytes(id);
    ends.push_back(bytes.size());
  }
  const size_t whole = bytes.find(text);
  size_t from = 0;
  for (const TextSpan& span : spans) {
    const std::string_view piece = std::string_view(text).substr(span.begin, span.end - span.begin);
    const size_t begin = whole == std::string::npos ? bytes.find(piece, from) : whole + span.begin;
    if (begin == std::string::npos || piece.empty()) continue;
    from = begin + piece.size();
    // Up to the first token that ends at the span's end or later, from the first that ends after
    // its begin; without those at the edges: that begins there or later, up to the last that ends
    // in time.
    int64_t first = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    int64_t last = std::lower_bound(ends.begin(), ends.end(), from) - ends.begin();
    if (edges == Edges::kOut) {
      const size_t starts = first == 0 ? 0 : ends[static_cast<size_t>(first) - 1];
      first += starts < begin;
      last -= ends[static_cast<size_t>(last)] > from;
      if (last < first) continue;
    }
    if (!ranges.empty() && first <= ranges.back().end) {
      ranges.back().end = std::max(ranges.back().end, last + 1);
    } else {
      ranges.push_back({first, last + 1});
    }
  }
  return ranges;
}

}  // namespace clo
