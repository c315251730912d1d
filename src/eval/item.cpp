#include "eval/item.h"

namespace clo {

std::string_view metric_name(Metric metric) {
  switch (metric) {
    case Metric::kMatchAll:
      return "match_all";
    case Metric::kMatchPart:
      return "match_part";
    case Metric::kF1:
      return "f1";
    case Metric::kF1Chinese:
      return "f1_characters";
    case Metric::kRougeL:
      return "rouge_l";
    case Metric::kRougeLChinese:
      return "rouge_l_characters";
    case Metric::kClass:
      return "class";
    case Metric::kIntegerShare:
      return "integer_share";
    case Metric::kEditSimilarity:
      return "edit_similarity";
    case Metric::kSubspan:
      return "subspan_em";
    case Metric::kFirstNumber:
      return "first_number";
    case Metric::kLastInteger:
      return "last_integer";
    case Metric::kLastWordInteger:
      return "last_word_integer";
    case Metric::kKvWord:
      return "kv_word";
    case Metric::kPrefixShare:
      return "prefix_share";
    case Metric::kWordRecall:
      return "word_recall";
    case Metric::kSubstring:
      return "substring";
    case Metric::kRecordFields:
      return "record_fields";
  }
  return "unknown";
}

std::string EvalItem::id() const {
  return suite + "/" + task + "/" + std::to_string(context) + "/" + std::to_string(index);
}

uint64_t item_seed(std::string_view suite, std::string_view task, int64_t context, int64_t index,
                   uint64_t run_seed) {
  // FNV-1a over the fields, each ended by a byte that no name holds.
  uint64_t hash = 0xCBF29CE484222325u;
  const auto add = [&](std::string_view bytes) {
    for (const char c : bytes) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
    hash = (hash ^ 0xFFu) * 0x100000001B3u;
  };
  add(suite);
  add(task);
  add(std::to_string(context));
  add(std::to_string(index));
  add(std::to_string(run_seed));
  return hash;
}

TextSpan append_span(std::string& text, std::string_view piece) {
  const size_t begin = text.size();
  text += piece;
  return {begin, text.size()};
}

}  // namespace clo
