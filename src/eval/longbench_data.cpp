#include "eval/longbench_data.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/utf8.h"
#include "eval/text_pieces.h"

namespace clo {

namespace {

enum class Prompt : uint8_t { kQuestion, kSummary, kExamples, kCount, kParagraph, kCode };

struct DataSet {
  std::string_view name;
  Metric metric;
  int64_t max_new_tokens;
  Prompt prompt;
  bool chinese = false;
  bool stop_at_line_end = false;
};

// Examples and code are given without a chat template.
constexpr DataSet kDataSets[] = {
    {"narrativeqa", Metric::kF1, 128, Prompt::kQuestion},
    {"qasper", Metric::kF1, 128, Prompt::kQuestion},
    {"multifieldqa_en", Metric::kF1, 64, Prompt::kQuestion},
    {"multifieldqa_zh", Metric::kF1Chinese, 64, Prompt::kQuestion, true},
    {"hotpotqa", Metric::kF1, 32, Prompt::kQuestion},
    {"2wikimqa", Metric::kF1, 32, Prompt::kQuestion},
    {"musique", Metric::kF1, 32, Prompt::kQuestion},
    {"dureader", Metric::kRougeLChinese, 128, Prompt::kQuestion, true},
    {"gov_report", Metric::kRougeL, 512, Prompt::kSummary},
    {"qmsum", Metric::kRougeL, 512, Prompt::kSummary},
    {"multi_news", Metric::kRougeL, 512, Prompt::kSummary},
    {"vcsum", Metric::kRougeLChinese, 512, Prompt::kSummary, true},
    {"trec", Metric::kClass, 64, Prompt::kExamples},
    {"triviaqa", Metric::kF1, 32, Prompt::kExamples},
    {"samsum", Metric::kRougeL, 128, Prompt::kExamples, false, true},
    {"lsht", Metric::kClass, 64, Prompt::kExamples, true},
    {"passage_count", Metric::kIntegerShare, 32, Prompt::kCount},
    {"passage_retrieval_en", Metric::kIntegerShare, 32, Prompt::kParagraph},
    {"passage_retrieval_zh", Metric::kIntegerShare, 32, Prompt::kParagraph, true},
    {"lcc", Metric::kEditSimilarity, 64, Prompt::kCode},
    {"repobench-p", Metric::kEditSimilarity, 64, Prompt::kCode},
};

struct Entry {
  const DataSet* set = nullptr;
  std::string input, context;
  std::vector<std::string> answers, classes;
  double length = 0;
};

// What stands before the context and after it.
struct Frame {
  std::string before, after;
};

Frame frame_of(const Entry& entry) {
  const bool zh = entry.set->chinese;
  const std::string& input = entry.input;
  switch (entry.set->prompt) {
    case Prompt::kQuestion:
      if (zh)
        return {"请阅读下面的文字，然后简短地回答问题。\n\n", "\n\n问题：" + input + "\n回答："};
      return {
          "Read the text and answer the question from it, as shortly as you can and with "
          "nothing else.\n\n",
          "\n\nQuestion: " + input + "\nAnswer:"};
    case Prompt::kSummary:
      if (zh) return {"请总结下面的内容。\n\n", "\n\n" + input + "\n总结："};
      return {"Read the text and sum it up.\n\n",
              (input.empty() ? "\n\n" : "\n\nSum up what answers this: " + input + "\n") +
                  std::string("Summary:")};
    case Prompt::kExamples:
      if (zh) return {"请按照例子的方式作答。\n\n", "\n" + input};
      return {"Answer the last one as the examples are answered.\n\n", "\n" + input};
    case Prompt::kCount:
      return {
          "Some of these paragraphs stand here several times.\n\n",
          "\n\nHow many different paragraphs are there? Answer with the number alone.\nNumber:"};
    case Prompt::kParagraph:
      if (zh) {
        return {"下面有一些段落，以及其中一个段落的摘要。\n\n",
                "\n\n摘要：" + input + "\n这是哪个段落的摘要？请用“段落1”的形式回答。\n回答："};
      }
      return {"Below are paragraphs and a summary of one of them.\n\n",
              "\n\nSummary: " + input +
                  "\nWhich paragraph is summed up? Answer in the form \"Paragraph 1\".\nAnswer:"};
    case Prompt::kCode:
      return {"Complete the code.\n", input + "\nThe next line of the code:"};
  }
  return {};
}

// The first and the last half of `bytes` bytes, cut between characters.
std::string without_middle(const std::string& text, size_t bytes) {
  if (bytes >= text.size()) return text;
  const auto inside = [&](size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0u) == 0x80u;
  };
  size_t head = bytes / 2, tail = text.size() - (bytes - head);
  while (head > 0 && inside(head)) --head;
  while (inside(tail)) ++tail;
  return text.substr(0, head) + text.substr(tail);
}

EvalItem item_of(const SuiteRequest& request, const Entry& entry, int64_t bytes) {
  const DataSet& set = *entry.set;
  EvalItem item = request.start();
  const Frame frame = frame_of(entry);
  item.text = std::string(trimmed(
      frame.before + without_middle(entry.context, static_cast<size_t>(bytes)) + frame.after));
  item.raw = set.prompt == Prompt::kExamples || set.prompt == Prompt::kCode;
  // The answer goes on in the prompt's last line, but code on a line of its own.
  const size_t last_line = item.text.rfind('\n');
  if (set.prompt != Prompt::kCode && last_line != std::string::npos) {
    item.answer_prefix = item.text.substr(last_line + 1);
    item.text = std::string(trimmed(std::string_view(item.text).substr(0, last_line)));
  }
  item.answers = entry.answers;
  item.classes = entry.classes;
  item.metric = set.metric;
  item.first_line = set.prompt == Prompt::kExamples;
  if (set.stop_at_line_end) item.stop = {"\n"};
  item.max_new_tokens = set.max_new_tokens;
  item.numbers["length"] = entry.length;
  item.numbers["cut"] = bytes < std::ssize(entry.context);
  return item;
}

Error bad_line(const std::string& where, const std::string& what) {
  return Error{ErrorCode::kBadFile, what, where};
}

Result<std::vector<std::string>> strings_of(const nlohmann::json& json, const char* field,
                                            const std::string& where) {
  std::vector<std::string> values;
  bool right = json.is_array();
  for (const auto& value : json) {
    right = right && value.is_string();
    if (right) values.push_back(value.get<std::string>());
  }
  if (right) return values;
  return bad_line(
      where, std::string("\"") + field + "\": expected an array of strings, found " +
                 json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 60));
}

Result<Entry> entry_of(const std::string& line, const std::string& where) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
  if (json.is_discarded()) {
    return bad_line(where, "expected one JSON object a line, found \"" +
                               line.substr(0, find_invalid_utf8(line.substr(0, 40))) + "\"");
  }
  if (!json.is_object()) return bad_line(where, "expected a JSON object, found another value");
  std::string missing;
  for (const char* field : {"input", "context", "answers", "length", "dataset"}) {
    if (!json.contains(field)) missing += (missing.empty() ? "" : ", ") + std::string(field);
  }
  if (!missing.empty()) {
    return bad_line(where,
                    "expected the fields input, context, answers, length and dataset of LongBench, "
                    "found none of: " +
                        missing);
  }
  for (const char* field : {"input", "context", "dataset"}) {
    if (!json.at(field).is_string()) {
      return bad_line(where, std::string("\"") + field +
                                 "\": expected an array of strings, found " +
                                 (json.is_array() ? "one with other values" : json.type_name()));
    }
  }
  if (!json.at("length").is_number()) return bad_line(where, "\"length\": expected a number");
  Entry entry;
  const std::string name = json.at("dataset");
  const auto found = std::find_if(
      std::begin(kDataSets), std::end(kDataSets),
      [&](const DataSet& set) { return name == set.name || name == std::string(set.name) + "_e"; });
  if (found == std::end(kDataSets)) {
    std::string known;
    for (const DataSet& set : kDataSets) {
      known += (known.empty() ? "" : ", ") + std::string(set.name);
    }
    return bad_line(where, "\"dataset\": expected one of " + known + "; found \"" + name + "\"");
  }
  entry.set = found;
  entry.input = json.at("input");
  entry.context = json.at("context");
  entry.length = json.at("length");
  CLO_ASSIGN(entry.answers, strings_of(json.at("answers"), "answers", where));
  if (entry.answers.empty()) return bad_line(where, "\"answers\": expected at least one");
  if (found->metric == Metric::kClass) {
    if (!json.contains("all_classes")) {
      return bad_line(where, "expected the field all_classes, which " + name + " is scored by");
    }
    CLO_ASSIGN(entry.classes, strings_of(json.at("all_classes"), "all_classes", where));
  }
  return entry;
}

using Data = std::map<std::string, std::vector<Entry>>;

}  // namespace

Result<Suite> parse_longbench(const std::vector<LongBenchText>& texts) {
  auto data = std::make_shared<Data>();
  Suite suite;
  suite.name = "longbench";
  suite.what = "LongBench from its files";
  suite.default_items = 0;
  for (const LongBenchText& text : texts) {
    bool any = false;
    int64_t number = 0;
    for (size_t at = 0; at < text.lines.size();) {
      const size_t end = std::min(text.lines.find('\n', at), text.lines.size());
      const std::string line = text.lines.substr(at, end - at);
      at = end + 1;
      ++number;
      if (trimmed(line).empty()) continue;
      CLO_ASSIGN(Entry entry, entry_of(line, text.where + ":" + std::to_string(number)));
      const std::string name(entry.set->name);
      auto& of_set = (*data)[name];
      if (of_set.empty()) suite.tasks.push_back(name);
      of_set.push_back(std::move(entry));
      any = true;
    }
    if (!any) return bad_line(text.where, "expected JSON lines, found none");
  }
  suite.num_items = [data](const std::string& task, int64_t items, int64_t) {
    const int64_t all = std::ssize(data->at(task));
    return items == 0 ? all : std::min(items, all);
  };
  suite.make = [data](const SuiteRequest& request) {
    const Entry& entry = data->at(request.task)[static_cast<size_t>(request.index)];
    return request.fit([&](int64_t bytes) { return item_of(request, entry, bytes); }, 0,
                       std::ssize(entry.context));
  };
  return suite;
}

Result<Suite> load_longbench(const std::vector<std::string>& paths) {
  std::vector<LongBenchText> texts;
  for (const std::string& path : paths) {
    std::error_code fault;
    if (std::filesystem::is_directory(path, fault)) {
      return bad_line(path, "expected a file of JSON lines, found a folder");
    }
    std::ifstream file(path, std::ios::binary);
    if (!file) return bad_line(path, std::string("cannot be read: ") + std::strerror(errno));
    texts.push_back({path, std::string((std::istreambuf_iterator<char>(file)), {})});
    if (file.bad()) return bad_line(path, "cannot be read");
  }
  return parse_longbench(texts);
}

}  // namespace clo
