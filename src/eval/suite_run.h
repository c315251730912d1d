#pragma once
// Runs items of a suite, densely and under each policy, and keeps what each gave.
#include <map>
#include <string>
#include <vector>

#include "clo/engine.h"
#include "eval/item.h"
#include "eval/named_policy.h"
#include "eval/prompt.h"

namespace clo {

// Direct: the question after the whole context. The others ask for the evidence first and then the
// question, in a new short prompt with the recitation alone, or further on in the same
// conversation.
enum class SolveMode : uint8_t { kDirect, kFresh, kKeep };

// Most tokens of a recitation, and what its turn may add to a prompt beside them.
inline constexpr int64_t kReciteTokens = 512;
inline constexpr int64_t kReciteFrameTokens = 160;

// One item under one policy.
struct PolicyRecord {
  double score = 0;
  std::string answer;
  std::string recitation;
  double recited = 0;   // share of the evidence's pieces that stand in the recitation
  KvCounters counters;  // of all turns
  int64_t decode_steps = 0;
  int64_t row_bytes = 0;
  double seconds = 0;              // prefill and decode
  std::vector<double> layer_gold;  // share of the evidence's rows attended; empty: not counted
};

inline constexpr const char* kDenseName = "dense";

struct ItemRecord {
  std::string id, task, metric;
  int64_t context = 0, index = 0;
  uint64_t seed = 0;
  int64_t prompt_tokens = 0;
  int64_t gold_tokens = 0;  // 0: no evidence of its own, or it could not be found
  std::vector<std::string> answers;
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> labels;
  std::map<std::string, PolicyRecord> results;  // by policy; "dense" is always there

  const PolicyRecord& dense() const { return results.at(kDenseName); }
};

// Runs an item densely, then under each policy that is not named "dense". Fails with the first
// failed request.
Result<ItemRecord> run_item(Engine& engine, const EvalItem& item,
                            const std::vector<NamedPolicy>& policies, SolveMode mode);

// As one JSON line without its newline, and back. Fails: kBadFile for what to_line did not make.
std::string to_line(const ItemRecord& record);
Result<ItemRecord> from_line(const std::string& line, const std::string& where);

}  // namespace clo
