#pragma once
// The recall suite: facts planted in long documents and asked for, under a policy and densely, on
// the same items. Several facts share one document and so one prefill.
#include <functional>
#include <string>
#include <vector>

#include "clo/engine.h"
#include "eval/documents.h"
#include "eval/named_policy.h"

namespace clo {

struct RecallOptions {
  int64_t context_tokens = 4096;  // prompt and answer together
  int64_t first_seed = 0;         // a multiple of facts_per_document
  int64_t items = 100;            // seeds first_seed to first_seed + items - 1
  int64_t facts_per_document = 6;
  int64_t clear_tokens = 256;  // no fact among the last tokens of a document
  int64_t max_new_tokens = 32;
  std::string licence_folder = kLicenceFolder;
};

// One item under one policy.
struct RecallOutcome {
  std::string answer;
  bool right = false;
  // Teacher-forced on the dense answer (the free run itself when it gave that answer).
  int64_t compared_tokens = 0;
  int64_t agreed_tokens = 0;  // same most likely token
  double kl_sum = 0;          // KL(dense || policy), nats, summed over tokens
  double mass_kept = 0;       // mean over heads and steps
  // Of the free run.
  KvCounters counters;
  int64_t decode_steps = 0;
  double share_attended = 1;
  int64_t row_bytes = 0;
};

struct RecallItem {
  int64_t seed = 0;
  int64_t document = 0;
  bool licence_text = false;
  int64_t prompt_tokens = 0;
  Fact fact;
  RecallOutcome dense;
  std::vector<RecallOutcome> policies;  // in the order asked
};

// Runs all items; `on_item` sees each as it is done. Fails with the first failed request.
Result<std::vector<RecallItem>> run_recall(
    Engine& engine, const RecallOptions& options, const std::vector<NamedPolicy>& policies,
    const std::function<void(const RecallItem&, int64_t done)>& on_item);

}  // namespace clo
