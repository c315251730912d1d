// Stand-ins for LongBench's categories, generated: named "like" because their texts are invented
// and shorter in kind than the real ones, which eval/longbench_data.h reads.
#include <algorithm>

#include "eval/prose.h"
#include "eval/suites.h"
#include "eval/words.h"
#include "eval/world.h"

namespace clo {

namespace {

EvalItem question_answering(const SuiteRequest& request, int64_t distractors) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  const int hops = request.task == "single_doc_qa" ? 1 : 2;
  ItemRandom place(random.next());
  const WorldItem world = make_world_item(hops, distractors, random);
  std::vector<int64_t> places = distinct_below(hops, hops + distractors, place);
  shuffle(places, place);
  const std::vector<WorldDocument> documents = place_documents(world, places);
  if (hops == 1) {
    item.text = "Answer the question from the article, as shortly as you can.\n\n";
    for (const WorldDocument& document : documents) {
      const TextSpan span = append_span(item.text, document.text);
      item.text += "\n";
      if (!document.gold) continue;
      item.gold.push_back({span.begin + document.fact.begin, span.begin + document.fact.end});
    }
  } else {
    item.text = "Answer the question from the passages, as shortly as you can.\n\n";
    append_documents(item, documents);
  }
  item.text += "Question: " + world.question;
  item.answer_prefix = "Answer:";
  item.answers = {world.answer};
  item.metric = Metric::kF1;
  item.max_new_tokens = hops == 1 ? 64 : 32;
  return item;
}

// Five findings among prose; the summary is their sentences in order.
EvalItem summarization(const SuiteRequest& request, int64_t sentences) {
  constexpr int64_t kFindings = 5;
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  ItemRandom place(random.next());
  std::vector<Piece> findings;
  std::string summary;
  for (int64_t i = 0; i < kFindings; ++i) {
    const std::string finding =
        "The committee finds that the " + std::string(pick(adjectives(), random)) + " " +
        std::string(pick(nouns(), random)) + " " + std::string(pick(verbs(), random)) + " the " +
        std::string(pick(nouns(), random)) + ".";
    summary += (i > 0 ? " " : "") + finding;
    findings.push_back({finding, true});
  }
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < sentences; ++i) pieces.push_back({prose_sentence(random), false});
  const std::vector<int64_t> places =
      distinct_below(kFindings, std::max(kFindings, sentences), place);
  for (size_t i = findings.size(); i-- > 0;) {
    pieces.insert(pieces.begin() + std::min(places[i], sentences), findings[i]);
  }
  item.text = "Read the report and sum up its findings.\n\n";
  append_pieces(item, pieces, " ");
  item.text +=
      "\n\nSum up the report: give every sentence that begins with \"The committee finds "
      "that\", in order, and nothing else.";
  item.answer_prefix = "Summary:";
  item.answers = {summary};
  item.metric = Metric::kRougeL;
  item.max_new_tokens = 256;
  return item;
}

// Examples of 50 classes, each known by three nouns of its own.
EvalItem few_shot(const SuiteRequest& request, int64_t examples) {
  constexpr int64_t kClasses = 50;
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  std::vector<std::string_view> words(nouns().begin(), nouns().end());
  shuffle(words, random);
  const auto example_of = [&](int64_t label) {
    const auto own = [&](uint64_t first) {
      return std::string(words[static_cast<size_t>(3 * label) + first]);
    };
    const uint64_t left_out = random.below(3);
    return "Text: The " + std::string(pick(adjectives(), random)) + " " + own((left_out + 1) % 3) +
           " " + std::string(pick(verbs(), random)) + " the " + own((left_out + 2) % 3) + ".";
  };
  for (int64_t c = 0; c < kClasses; ++c) item.classes.push_back("class " + std::to_string(10 + c));
  const auto asked = static_cast<int64_t>(random.below(kClasses));
  const std::string question = example_of(asked);
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < examples; ++i) {
    // The asked class is among the first that are shown, so that any prompt can be answered.
    const auto label = i == 0 ? asked : static_cast<int64_t>(random.below(kClasses));
    pieces.push_back({example_of(label) + "\nLabel: " + item.classes[static_cast<size_t>(label)],
                      label == asked});
  }
  ItemRandom order(random.next());
  shuffle(pieces, order);
  item.text = "Label the last text as the examples are labelled.\n";
  append_pieces(item, pieces, "\n");
  item.text += "\n" + question;
  item.answer_prefix = "Label:";
  item.raw = true;
  item.first_line = true;
  item.answers = {item.classes[static_cast<size_t>(asked)]};
  item.metric = Metric::kClass;
  item.max_new_tokens = 64;
  return item;
}

struct Paragraph {
  std::string text;
  std::vector<std::string> things;
};

Paragraph draw_paragraph(int64_t sentences, ItemRandom& random) {
  Paragraph paragraph;
  for (int64_t i = 0; i < sentences; ++i) {
    const auto thing = [&] {
      paragraph.things.push_back(std::string(pick(adjectives(), random)) + " " +
                                 std::string(pick(nouns(), random)));
      return "the " + paragraph.things.back();
    };
    const std::string subject = thing();
    paragraph.text += (i > 0 ? " Now " : "Here ") + subject + " " +
                      std::string(pick(verbs(), random)) + " " + thing() + ".";
  }
  return paragraph;
}

// 30 paragraphs; units are sentences of each.
EvalItem passage_retrieval(const SuiteRequest& request, int64_t sentences) {
  constexpr int64_t kParagraphs = 30;
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  const auto asked = random.below(kParagraphs);
  std::vector<Piece> pieces;
  std::vector<std::string> things;
  for (uint64_t p = 0; p < kParagraphs; ++p) {
    ItemRandom own(random.next());
    const Paragraph paragraph = draw_paragraph(sentences, own);
    if (p == asked) things = paragraph.things;
    pieces.push_back({"Paragraph " + std::to_string(p + 1) + ": " + paragraph.text, p == asked});
  }
  shuffle(things, random);
  things.resize(std::min<size_t>(things.size(), 4));
  item.text = "Below are 30 paragraphs and a description of one of them.\n\n";
  append_pieces(item, pieces, "\n");
  item.text += "\n\nDescription: it tells of ";
  for (size_t i = 0; i < things.size(); ++i) {
    item.text += (i == 0 ? "a " : i + 1 < things.size() ? ", a " : " and a ") + things[i];
  }
  item.text += ".\nWhich paragraph is described? Answer in the form \"Paragraph 1\".";
  item.answer_prefix = "The answer is:";
  item.answers = {"Paragraph " + std::to_string(asked + 1)};
  item.metric = Metric::kIntegerShare;
  item.max_new_tokens = 32;
  return item;
}

EvalItem passage_count(const SuiteRequest& request, int64_t distinct) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  std::vector<std::string> texts;
  for (int64_t p = 0; p < distinct; ++p) {
    const uint64_t times = 1 + random.below(5);
    const Paragraph paragraph = draw_paragraph(3, random);
    texts.insert(texts.end(), times, paragraph.text);
  }
  ItemRandom order(random.next());
  shuffle(texts, order);
  item.text =
      "Some of these paragraphs stand here several times. How many different ones are "
      "there?\n\n";
  for (size_t i = 0; i < texts.size(); ++i) {
    item.text += "Paragraph " + std::to_string(i + 1) + ": " + texts[i] + "\n";
  }
  item.text += "\nHow many different paragraphs are there? Answer with the number alone.";
  item.answer_prefix = "The number is:";
  item.answers = {std::to_string(distinct)};
  item.metric = Metric::kIntegerShare;
  item.max_new_tokens = 32;
  return item;
}

// The last function has the name of an earlier one with "_again": its body begins the same.
EvalItem code(const SuiteRequest& request, int64_t functions) {
  EvalItem item = request.start();
  ItemRandom random(item.seed);
  ItemRandom choice(random.next());
  const auto asked = static_cast<int64_t>(choice.below(static_cast<uint64_t>(functions)));
  std::vector<Piece> pieces;
  std::string last;
  for (int64_t f = 0; f < functions; ++f) {
    const std::string name = std::string(pick(nouns(), random)) + "_" + letters(random, 4, 'a');
    const std::string line = "    value = " + std::string(pick(adjectives(), random)) + "_" +
                             std::string(pick(nouns(), random)) + "(x, " + digits(random, 3) + ")";
    pieces.push_back({"def " + name + "(x):\n" + line + "\n    return value\n", f == asked});
    if (f != asked) continue;
    last = "def " + name + "_again(x):";
    item.answers = {line};
  }
  item.text = "# Complete the last function.\n\n";
  append_pieces(item, pieces, "\n");
  item.text += "\n" + last;
  item.raw = true;
  item.metric = Metric::kEditSimilarity;
  item.max_new_tokens = 64;
  return item;
}

}  // namespace

Result<EvalItem> make_longbench_like(const SuiteRequest& request) {
  const auto fit = [&](auto make, int64_t least) {
    return request.fit([&](int64_t units) { return make(request, units); }, least);
  };
  if (request.task.ends_with("_doc_qa")) return fit(question_answering, 0);
  if (request.task == "summarization") return fit(summarization, 0);
  if (request.task == "few_shot") return fit(few_shot, 1);
  if (request.task == "passage_retrieval") return fit(passage_retrieval, 1);
  if (request.task == "passage_count") return fit(passage_count, 1);
  return fit(code, 1);
}

}  // namespace clo
