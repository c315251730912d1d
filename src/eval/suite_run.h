#pragma once
// Runs items of a suite, densely and under each policy, and keeps what each gave.
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "clo/engine.h"
#include "eval/item.h"
#include "eval/named_policy.h"
#include "eval/prompt.h"
#include "eval/set_watcher.h"

namespace clo {

// Direct: the question after the whole context. The others ask for the evidence first and then the
// question, in a new short prompt with the recitation alone, or further on in the same
// conversation.
enum class SolveMode : uint8_t { kDirect, kFresh, kKeep };

// Most tokens of a recitation, and what its turn may add to a prompt beside them.
inline constexpr int64_t kReciteTokens = 512;
inline constexpr int64_t kReciteFrameTokens = 160;

// What a model quoted when it was asked for the evidence, and how much of that is right.
struct Recitation {
  std::string text;
  double sentences = 0;  // share of the evidence's that stand in it, word for word
  double tokens = 0;     // share of the evidence's in the longest common subsequence with it
  bool exact = false;    // all of its sentences, word for word
};

// One item under one policy.
struct PolicyRecord {
  double score = 0;
  std::string answer;
  std::optional<Recitation> recitation;  // absent when nothing was asked for, or there is none
  KvCounters counters;                   // of all turns
  int64_t decode_steps = 0;
  int64_t row_bytes = 0;
  double seconds = 0;              // prefill and decode
  std::vector<double> layer_gold;  // share of the evidence's rows attended; empty: not counted
  std::optional<SetFigures> sets;  // absent: not measured
};

inline constexpr const char* kDenseName = "dense";

struct ItemRecord {
  std::string id, task, metric;
  int64_t context = 0, index = 0;
  uint64_t seed = 0;
  int64_t prompt_tokens = 0;
  int64_t gold_tokens = 0;    // 0: no evidence of its own, or it could not be found
  int64_t masked_tokens = 0;  // of the prompt, which no other token attends to
  std::vector<std::string> answers;
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> labels;
  std::map<std::string, PolicyRecord> results;  // by policy; "dense" is always there

  const PolicyRecord& dense() const { return results.at(kDenseName); }
};

// evidence: its sentences. White space does not count. Fails: as Engine::encode.
Result<Recitation> score_recitation(const Engine& engine, const std::string& text,
                                    const std::vector<std::string>& evidence);

// Runs an item densely, then under each policy that is not named "dense". `watcher`: the engine's
// observer, or null. Fails with the first failed request.
Result<ItemRecord> run_item(Engine& engine, const EvalItem& item,
                            const std::vector<NamedPolicy>& policies, SolveMode mode,
                            SetWatcher* watcher = nullptr);

// As one JSON line without its newline, and back. Fails: kBadFile for what to_line did not make.
std::string to_line(const ItemRecord& record);
Result<ItemRecord> from_line(const std::string& line, const std::string& where);

}  // namespace clo
