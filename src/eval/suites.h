#pragma once
// The suites of generated items. Each makes any of its items alone, from the request's numbers;
// docs/evaluation.md says what each task is and where it departs from its source.
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "clo/result.h"
#include "eval/fit.h"
#include "eval/item.h"

namespace clo {

// Which item to make.
struct SuiteRequest {
  std::string suite;
  std::string task;
  int64_t context = 0;
  int64_t index = 0;
  uint64_t seed = 0;           // of the run
  int64_t items = 1;           // --items: what sweeps over positions has this many of them
  int64_t depths = 11;         // depths of the niah grid
  int64_t reserve_tokens = 0;  // kept free beside prompt and answer
  ItemCounter count;

  // An item with the names and the seed filled in.
  EvalItem start() const;
  // Fits `make` with the reserve.
  Result<EvalItem> fit(const ItemMaker& make, int64_t least_units = 0,
                       int64_t most_units = std::numeric_limits<int64_t>::max()) const;
};

struct Suite {
  std::string_view name;
  std::string_view what;  // one line for --help
  std::vector<std::string> tasks;
  // How many items --items N gives of a task: some are rendered in several ways.
  std::function<int64_t(const std::string& task, int64_t items, int64_t depths)> num_items;
  // Fails: kBadRequest when the context is too short.
  std::function<Result<EvalItem>(const SuiteRequest&)> make;
  bool can_retrieve_then_solve = false;
  int64_t default_items = 20;  // 0: all there are
};

const std::vector<Suite>& all_suites();
const Suite* find_suite(std::string_view name);  // null: there is none

// Where item `index` of `items` stands in a sweep from 0 to 1; the middle for one item.
double sweep(int64_t index, int64_t items);

// One function for each kind of task.
Result<EvalItem> make_ruler_niah(const SuiteRequest& request);
Result<EvalItem> make_ruler_words(const SuiteRequest& request);  // vt, cwe, fwe
Result<EvalItem> make_ruler_qa(const SuiteRequest& request);
Result<EvalItem> make_niah(const SuiteRequest& request);
Result<EvalItem> make_infinite_retrieval(const SuiteRequest& request);  // kv, passkey, number
Result<EvalItem> make_infinite_compute(const SuiteRequest& request);    // math, code
Result<EvalItem> make_multihop(const SuiteRequest& request);
Result<EvalItem> make_position(const SuiteRequest& request);
Result<EvalItem> make_length(const SuiteRequest& request);
Result<EvalItem> make_longbench_like(const SuiteRequest& request);

// Ways in which each multihop item is rendered.
int64_t num_multihop_renders(const std::string& task);

}  // namespace clo
