#include "eval/suites.h"

#include <algorithm>

namespace clo {

namespace {

int64_t plain_count(const std::string&, int64_t items, int64_t) { return items; }
int64_t grid_count(const std::string&, int64_t items, int64_t depths) { return items * depths; }
int64_t multihop_count(const std::string& task, int64_t items, int64_t) {
  return items * num_multihop_renders(task);
}

Result<EvalItem> make_ruler(const SuiteRequest& request) {
  if (request.task.starts_with("niah")) return make_ruler_niah(request);
  return request.task.starts_with("qa") ? make_ruler_qa(request) : make_ruler_words(request);
}

Result<EvalItem> make_infinite(const SuiteRequest& request) {
  const bool computes = request.task.starts_with("math") || request.task.starts_with("code");
  return computes ? make_infinite_compute(request) : make_infinite_retrieval(request);
}

}  // namespace

EvalItem SuiteRequest::start() const {
  EvalItem item;
  item.suite = suite;
  item.task = task;
  item.context = context;
  item.index = index;
  item.seed = item_seed(suite, task, context, index, seed);
  return item;
}

Result<EvalItem> SuiteRequest::fit(const ItemMaker& make, int64_t least_units,
                                   int64_t most_units) const {
  return fit_item(count, make, {least_units, most_units, reserve_tokens});
}

double sweep(int64_t index, int64_t items) {
  return items > 1 ? static_cast<double>(index) / static_cast<double>(items - 1) : 0.5;
}

const std::vector<Suite>& all_suites() {
  static const std::vector<Suite> kSuites = {
      {"ruler",
       "RULER's 13 tasks, generated: needles, variables, word counts, questions",
       {"niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
        "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_syn_1",
        "qa_syn_2"},
       plain_count,
       make_ruler},
      {"niah",
       "One needle in prose, over a grid of length and depth",
       {"needle"},
       grid_count,
       make_niah},
      {"infinite",
       "InfiniteBench's synthetic tasks: KV retrieval, pass key, number, math, code",
       {"kv_retrieval", "passkey", "number", "math_find", "math_calc", "code_run"},
       plain_count,
       make_infinite},
      {"multihop",
       "Questions of 2 to 4 hops whose evidence is adjacent or separated, paired",
       {"2_hops", "3_hops", "4_hops"},
       multihop_count,
       make_multihop,
       true},
      {"position",
       "Sentences, functions and records asked for at every position (as VaL)",
       {"document", "code", "database"},
       plain_count,
       make_position},
      {"length",
       "Sums of variables without filler and with it: does length alone hurt?",
       {"none", "prose_start", "prose_end", "whitespace_start", "whitespace_end", "masked_start",
        "masked_end"},
       plain_count,
       make_length,
       true},
      {"longbench",
       "LongBench-like tasks, generated; with --data LongBench itself from its files",
       {"single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "passage_retrieval",
        "passage_count", "code"},
       plain_count,
       make_longbench_like},
  };
  return kSuites;
}

const Suite* find_suite(std::string_view name) {
  const auto& suites = all_suites();
  const auto found = std::find_if(suites.begin(), suites.end(),
                                  [&](const Suite& suite) { return suite.name == name; });
  return found == suites.end() ? nullptr : &*found;
}

}  // namespace clo
