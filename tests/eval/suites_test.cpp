// Generated items: as long as the context allows, the same for the same seed, with the evidence
// where they say it is.
#include "eval/suites.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <tuple>

#include "clo/engine.h"
#include "eval/scorers.h"
#include "eval/suite_run.h"
#include "eval/world.h"
#include "text/tokenizer.h"

namespace clo {
namespace {

// One engine for all tests: it is only asked for tokens.
Engine& recall_engine() {
  static const std::unique_ptr<Engine> engine = [] {
    EngineOptions options;
    options.model_dir = CLO_SOURCE_DIR "/models/recall-7m";
    options.max_context_tokens = 16384;
    auto loaded = Engine::load(options);
    EXPECT_TRUE(loaded);
    return std::move(loaded).value();
  }();
  return *engine;
}

SuiteRequest request_for(const Suite& suite, const std::string& task, int64_t context,
                         int64_t index, const ItemCounter& count) {
  SuiteRequest request;
  request.suite = suite.name;
  request.task = task;
  request.context = context;
  request.index = index;
  request.items = 8;
  request.count = count;
  return request;
}

int64_t context_for(const Suite& suite) { return suite.name == "multihop" ? 6000 : 2048; }

EvalItem made(const Suite& suite, const SuiteRequest& request) {
  auto item = suite.make(request);
  EXPECT_TRUE(item) << item.error().to_string();
  return item ? std::move(*item) : EvalItem{};
}

class EverySuite : public testing::TestWithParam<std::string> {
 protected:
  const Suite& suite() const { return *find_suite(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Names, EverySuite, testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const Suite& suite : all_suites()) names.emplace_back(suite.name);
                           return names;
                         }()),
                         [](const auto& named) { return named.param; });

TEST_P(EverySuite, ItemsAreTheSameForTheSameSeedAndDifferForAnother) {
  const PromptMaker prompts(recall_engine());
  for (const std::string& task : suite().tasks) {
    SuiteRequest request = request_for(suite(), task, context_for(suite()), 3, prompts.counter());
    const EvalItem first = made(suite(), request), again = made(suite(), request);
    EXPECT_EQ(first.text, again.text) << task;
    EXPECT_EQ(first.answers, again.answers);
    EXPECT_EQ(first.id(), again.id());
    request.seed = 1;
    EXPECT_NE(made(suite(), request).text, first.text) << task;
  }
}

TEST_P(EverySuite, PromptAndAnswerFitAndFillTheContext) {
  const PromptMaker prompts(recall_engine());
  for (const std::string& task : suite().tasks) {
    for (const int64_t context : {context_for(suite()), 2 * context_for(suite())}) {
      const EvalItem item =
          made(suite(), request_for(suite(), task, context, 1, prompts.counter()));
      const auto tokens = prompts.count(item);
      ASSERT_TRUE(tokens);
      const int64_t used = *tokens + item.max_new_tokens;
      EXPECT_LE(used, context) << task;
      // One unit of filler: a sentence, a line, a pair, a document, or L/32 words.
      const int64_t unit = task == "fwe" ? context / 8 : 300;
      const bool may_be_short = task == "none";
      if (!may_be_short) {
        EXPECT_GT(used, context - unit) << task;
      }
    }
  }
}

TEST_P(EverySuite, TheReserveStaysFree) {
  const PromptMaker prompts(recall_engine());
  const std::string task = suite().tasks.back();
  SuiteRequest request = request_for(suite(), task, context_for(suite()), 1, prompts.counter());
  request.reserve_tokens = 500;
  const EvalItem item = made(suite(), request);
  EXPECT_LE(*prompts.count(item) + item.max_new_tokens, context_for(suite()) - 500);
}

TEST_P(EverySuite, EvidenceStandsWhereItSaysInTextAndTokens) {
  const Engine& engine = recall_engine();
  const PromptMaker prompts(engine);
  for (const std::string& task : suite().tasks) {
    const EvalItem item =
        made(suite(), request_for(suite(), task, context_for(suite()), 2, prompts.counter()));
    const Request request = prompts.request(item);
    const auto ids = engine.tokenize(request);
    const auto ranges = prompts.token_ranges(request, item.text, item.gold);
    ASSERT_TRUE(ids && ranges);
    std::string evidence, decoded;
    size_t end = 0;
    for (const TextSpan& span : item.gold) {
      ASSERT_GE(span.begin, end) << task;
      ASSERT_LT(span.begin, span.end);
      ASSERT_LE(span.end, item.text.size());
      end = span.end;
      evidence += item.text.substr(span.begin, span.end - span.begin) + "\n";
    }
    int64_t last = 0;
    for (const TokenRange& range : *ranges) {
      ASSERT_GE(range.first, last) << task;
      last = range.end;
      for (int64_t t = range.first; t < range.end; ++t) {
        decoded += engine.token_bytes((*ids)[static_cast<size_t>(t)]);
      }
      decoded += "\n";
    }
    // A token may hold the space before, or the line end after.
    const auto bare = [](std::string text) {
      std::erase_if(text, [](char c) { return std::isspace(static_cast<unsigned char>(c)); });
      return text;
    };
    EXPECT_LE(bare(decoded).size(), bare(evidence).size() + 4 * item.gold.size()) << task;
    for (const TextSpan& span : item.gold) {
      EXPECT_NE(decoded.find(item.text.substr(span.begin, span.end - span.begin)),
                std::string::npos)
          << task;
    }
    const bool states_answer = suite().name == "niah" || task.starts_with("niah") ||
                               task == "passkey" || task == "number" || task == "kv_retrieval" ||
                               task.starts_with("qa_syn") || suite().name == "multihop" ||
                               suite().name == "position";
    if (!states_answer) continue;
    bool any = false;
    for (const std::string& answer : item.answers) {
      any = any || evidence.find(answer) != std::string::npos;
    }
    EXPECT_TRUE(any) << task;
  }
}

TEST_P(EverySuite, ARightAnswerScoresOneAndAnEmptyOneNothing) {
  const PromptMaker prompts(recall_engine());
  for (const std::string& task : suite().tasks) {
    const EvalItem item =
        made(suite(), request_for(suite(), task, context_for(suite()), 0, prompts.counter()));
    ASSERT_FALSE(item.answers.empty());
    std::string answer;
    for (const std::string& reference : item.answers) {
      answer += reference + (item.metric == Metric::kMatchAll ? ", " : "\n");
      if (item.metric != Metric::kMatchAll) break;
    }
    EXPECT_DOUBLE_EQ(score_answer(item, answer), 1) << task;
    EXPECT_DOUBLE_EQ(score_answer(item, ""), 0) << task;
  }
}

TEST_P(EverySuite, AContextThatIsTooShortIsRefused) {
  const PromptMaker prompts(recall_engine());
  const auto item =
      suite().make(request_for(suite(), suite().tasks.front(), 64, 0, prompts.counter()));
  ASSERT_FALSE(item);
  EXPECT_EQ(item.error().code, ErrorCode::kBadRequest);
  EXPECT_NE(item.error().message.find("64"), std::string::npos);
}

// Other vocabularies: byte-level ones with other splits. Lengths follow each.
TEST(Lengths, FollowTheTokenizer) {
  for (const char* name : {"gpt2", "llama3", "qwen2"}) {
    std::ifstream file(std::string(CLO_SOURCE_DIR "/tests/golden/text/tokenizer_") + name +
                       ".json");
    const std::string json((std::istreambuf_iterator<char>(file)), {});
    const auto tokenizer = Tokenizer::parse(json, name);
    ASSERT_TRUE(tokenizer) << tokenizer.error().to_string();
    const ItemCounter count = [&](const EvalItem& item) -> Result<int64_t> {
      auto ids = (*tokenizer).encode(item.text + "\n" + item.answer_prefix);
      if (!ids) return std::move(ids).error();
      return std::ssize(*ids);
    };
    for (const auto& [suite, task, context] : {std::tuple{"ruler", "niah_single_2", 3000},
                                               {"infinite", "kv_retrieval", 6000},
                                               {"length", "whitespace_start", 3000},
                                               {"multihop", "3_hops", 12000}}) {
      const Suite& made_by = *find_suite(suite);
      const EvalItem item = made(made_by, request_for(made_by, task, context, 0, count));
      const int64_t used = *count(item) + item.max_new_tokens;
      EXPECT_LE(used, context) << name << " " << task;
      EXPECT_GT(used, context - 600) << name << " " << task;
    }
  }
}

TEST(Niah, DepthsSweepFromStartToEnd) {
  const PromptMaker prompts(recall_engine());
  const Suite& suite = *find_suite("niah");
  double last = -1;
  for (int64_t index = 0; index < 11; ++index) {
    const EvalItem item = made(suite, request_for(suite, "needle", 2048, index, prompts.counter()));
    EXPECT_DOUBLE_EQ(item.numbers.at("depth"), static_cast<double>(index) / 10);
    const double at =
        static_cast<double>(item.gold[0].begin) / static_cast<double>(item.text.size());
    EXPECT_NEAR(at, item.numbers.at("depth"), 0.06);
    EXPECT_GT(at, last);
    last = at;
  }
}

TEST(Kv, TheAskedPairSweepsOverTheObject) {
  const PromptMaker prompts(recall_engine());
  const Suite& suite = *find_suite("infinite");
  for (int64_t index = 0; index < 8; ++index) {
    const EvalItem item =
        made(suite, request_for(suite, "kv_retrieval", 4096, index, prompts.counter()));
    EXPECT_NEAR(item.numbers.at("depth"), static_cast<double>(index) / 8, 0.05);
  }
}

// All renders of a world hold the same documents and ask the same; only the places differ.
TEST(Multihop, RendersArePaired) {
  const PromptMaker prompts(recall_engine());
  const Suite& suite = *find_suite("multihop");
  for (const std::string& task : suite.tasks) {
    const int64_t renders = num_multihop_renders(task);
    std::vector<std::string> documents;
    std::set<std::vector<size_t>> places;
    for (int64_t render = 0; render < renders; ++render) {
      const EvalItem item =
          made(suite, request_for(suite, task, 6000, renders + render, prompts.counter()));
      const EvalItem first =
          made(suite, request_for(suite, task, 6000, renders, prompts.counter()));
      EXPECT_EQ(item.question, first.question);
      EXPECT_EQ(item.answers, first.answers);
      EXPECT_EQ(item.numbers.at("world"), 1);
      EXPECT_EQ(std::ssize(item.gold), task[0] - '0');
      // In a reversed render the hops come backwards, so the sorted spans of both are the same
      // sentences in another order.
      std::multiset<std::string> facts, first_facts;
      std::vector<size_t> at;
      for (const TextSpan& span : item.gold) {
        facts.insert(item.text.substr(span.begin, span.end - span.begin));
        at.push_back(span.begin);
      }
      for (const TextSpan& span : first.gold) {
        first_facts.insert(first.text.substr(span.begin, span.end - span.begin));
      }
      EXPECT_EQ(facts, first_facts);
      places.insert(at);
      const bool adjacent = item.labels.at("layout") == "adjacent";
      if (adjacent) {
        EXPECT_EQ(item.numbers.at("distance"), task[0] - '1');
      }
      if (!adjacent) {
        EXPECT_GT(item.numbers.at("distance"), task[0] - '1');
      }
      // The recitation asks over the same text.
      EXPECT_TRUE(item.recite.starts_with(item.text.substr(0, item.gold.back().end)));
    }
    EXPECT_GT(std::ssize(places), renders / 2);
  }
}

TEST(World, TheAnswerStandsInOneDocumentAndNamesShareNoFourLetters) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    ItemRandom random(seed);
    const int hops = 1 + static_cast<int>(seed % 4);
    const WorldItem item = make_world_item(hops, 30, random);
    ASSERT_EQ(std::ssize(item.gold), hops);
    EXPECT_NE(item.question.find(item.gold[0].title), std::string::npos);
    for (int h = 0; h < hops; ++h) {
      const WorldDocument& document = item.gold[static_cast<size_t>(h)];
      const std::string fact =
          document.text.substr(document.fact.begin, document.fact.end - document.fact.begin);
      EXPECT_NE(fact.find(document.title), std::string::npos) << fact;
      const std::string object =
          h + 1 < hops ? item.gold[static_cast<size_t>(h) + 1].title : item.answer;
      EXPECT_NE(fact.find(object), std::string::npos) << fact;
      // What comes next is not in the question.
      if (h > 0) {
        EXPECT_EQ(item.question.find(document.title), std::string::npos);
      }
    }
    int64_t mentions = 0;
    for (const WorldDocument& document : item.distractors) {
      EXPECT_EQ(document.text.find(item.answer), std::string::npos);
      mentions += document.text.find(item.gold.back().title) != std::string::npos;
      for (const WorldDocument& gold : item.gold) {
        EXPECT_NE(document.title, gold.title);
        for (size_t i = 0; i + 4 <= gold.title.size(); ++i) {
          EXPECT_EQ(document.title.find(gold.title.substr(i, 4)), std::string::npos);
        }
      }
    }
    EXPECT_EQ(mentions, 2);
  }
}

TEST(Length, FillerAndPlaceChangeTheTextAlone) {
  const PromptMaker prompts(recall_engine());
  const Suite& suite = *find_suite("length");
  const EvalItem none = made(suite, request_for(suite, "none", 2048, 5, prompts.counter()));
  for (const std::string& task : suite.tasks) {
    const EvalItem item = made(suite, request_for(suite, task, 2048, 5, prompts.counter()));
    EXPECT_EQ(item.question, none.question);
    EXPECT_EQ(item.answers, none.answers);
    ASSERT_EQ(item.gold.size(), 4u);
    int sum = 0;
    for (const TextSpan& span : item.gold) {
      sum += std::stoi(integers_in(item.text.substr(span.begin, span.end - span.begin), false)[0]);
    }
    EXPECT_EQ(std::to_string(sum), item.answers[0]);
    const double at =
        static_cast<double>(item.gold[0].begin) / static_cast<double>(item.text.size());
    if (task.ends_with("_start")) {
      EXPECT_LT(at, 0.2);
    }
    if (task.ends_with("_end")) {
      EXPECT_GT(at, 0.5);
    }
  }
}

// Masked filler is the prose of the other tasks, and its tokens are all but those at the edges.
TEST(Length, MaskedFillerIsTheProseOfTheOthers) {
  const Engine& engine = recall_engine();
  const PromptMaker prompts(engine);
  const Suite& suite = *find_suite("length");
  for (const std::string place : {"_start", "_end"}) {
    const EvalItem item =
        made(suite, request_for(suite, "masked" + place, 2048, 5, prompts.counter()));
    const EvalItem prose =
        made(suite, request_for(suite, "prose" + place, 2048, 5, prompts.counter()));
    EXPECT_EQ(item.text, prose.text);
    EXPECT_TRUE(prose.masked.empty());
    ASSERT_EQ(item.masked.size(), 1u);
    const TextSpan span = item.masked[0];
    for (const TextSpan& gold : item.gold) {
      EXPECT_TRUE(gold.end <= span.begin || gold.begin >= span.end);
    }
    const std::string filler = item.text.substr(span.begin, span.end - span.begin);
    EXPECT_GT(filler.size(), item.text.size() / 2);
    // In the turn that asks for a quotation it stands at the same place.
    for (const std::string* turn : {&item.text, &item.recite}) {
      Request request = prompts.request(item);
      prompts.set_turns(item, {*turn}, request);
      const auto ids = engine.tokenize(request);
      const auto ranges =
          prompts.token_ranges(request, *turn, item.masked, PromptMaker::Edges::kOut);
      ASSERT_TRUE(ids && ranges);
      ASSERT_EQ(ranges->size(), 1u);
      std::string masked;
      for (int64_t t = ranges->front().first; t < ranges->front().end; ++t) {
        masked += engine.token_bytes((*ids)[static_cast<size_t>(t)]);
      }
      EXPECT_NE(filler.find(masked), std::string::npos);
      EXPECT_GT(masked.size() + 20, filler.size());
    }
  }
}

// A span from the middle of a word to the middle of another: tokens at its edges are in or out.
TEST(TokenRanges, EdgesAreInOrOut) {
  const Engine& engine = recall_engine();
  const PromptMaker prompts(engine);
  Request request;
  request.prompt = "alpha bravo charlie delta echo foxtrot";
  const std::string text = request.prompt;
  const auto ids = engine.tokenize(request);
  ASSERT_TRUE(ids);
  for (size_t begin = 0; begin < text.size(); ++begin) {
    for (size_t end = begin + 1; end <= text.size(); ++end) {
      std::vector<int64_t> in, out;
      size_t at = 0;
      for (size_t t = 0; t < ids->size(); ++t) {
        const size_t next = at + engine.token_bytes((*ids)[t]).size();
        if (at < end && next > begin) in.push_back(static_cast<int64_t>(t));
        if (at >= begin && next <= end) out.push_back(static_cast<int64_t>(t));
        at = next;
      }
      const auto found = [&](PromptMaker::Edges edges) {
        const auto ranges = prompts.token_ranges(request, text, {{begin, end}}, edges);
        std::vector<int64_t> tokens;
        for (const TokenRange& range : *ranges) {
          for (int64_t t = range.first; t < range.end; ++t) tokens.push_back(t);
        }
        return tokens;
      };
      ASSERT_EQ(found(PromptMaker::Edges::kIn), in) << begin << " " << end;
      ASSERT_EQ(found(PromptMaker::Edges::kOut), out) << begin << " " << end;
    }
  }
}

TEST(Recitations, CountSentencesAndTokens) {
  const Engine& engine = recall_engine();
  const std::vector<std::string> evidence = {"The value of ABCDE is 17.",
                                             "The value of FGHIJ is 4."};
  const auto scored = [&](const std::string& text) {
    const auto recitation = score_recitation(engine, text, evidence);
    EXPECT_TRUE(recitation);
    EXPECT_EQ(recitation->text, text);
    return *recitation;
  };
  const Recitation whole =
      scored("Of course:\nThe value of ABCDE  is 17.\nThe value of FGHIJ is 4.");
  EXPECT_TRUE(whole.exact);
  EXPECT_EQ(whole.sentences, 1);
  EXPECT_EQ(whole.tokens, 1);
  const Recitation half = scored("The value of FGHIJ is 4.");
  EXPECT_FALSE(half.exact);
  EXPECT_EQ(half.sentences, 0.5);
  const auto first = *engine.encode(" The value of ABCDE is 17.");
  const auto second = *engine.encode(" The value of FGHIJ is 4.");
  EXPECT_DOUBLE_EQ(half.tokens, static_cast<double>(second.size()) /
                                    static_cast<double>(first.size() + second.size()));
  // A longer number is another sentence, though all its tokens may be there; nothing is nothing.
  EXPECT_EQ(scored("The value of ABCDE is 170. The value of FGHIJ is 4.5").sentences, 0);
  const Recitation wrong = scored("The value of ABCDE is 98. The value of FGHIJ is 4.");
  EXPECT_EQ(wrong.sentences, 0.5);
  EXPECT_GT(wrong.tokens, 0.5);
  EXPECT_LT(wrong.tokens, 1);
  const Recitation nothing = scored("");
  EXPECT_EQ(nothing.sentences + nothing.tokens, 0);
  EXPECT_FALSE(nothing.exact);
}

TEST(Position, ASetSharesItsContext) {
  const PromptMaker prompts(recall_engine());
  const Suite& suite = *find_suite("position");
  for (const std::string& task : suite.tasks) {
    std::vector<EvalItem> items;
    for (int64_t index = 0; index < 8; ++index) {
      items.push_back(made(suite, request_for(suite, task, 4096, index, prompts.counter())));
    }
    for (int64_t index = 0; index < 8; ++index) {
      const EvalItem& item = items[static_cast<size_t>(index)];
      EXPECT_EQ(item.numbers.at("set"), index / 2);
      EXPECT_EQ(item.shared_prefix, items[static_cast<size_t>(index / 2 * 2)].shared_prefix);
      EXPECT_NEAR(item.numbers.at("depth"), index % 2 == 0 ? 0.25 : 0.75, 0.05);
      // The probe leads to one entry.
      EXPECT_EQ(item.gold.size(), 1u);
    }
    EXPECT_EQ(items[0].text.substr(0, 3000), items[1].text.substr(0, 3000));
    EXPECT_NE(items[0].text.substr(0, 3000), items[2].text.substr(0, 3000));
  }
}

}  // namespace
}  // namespace clo
