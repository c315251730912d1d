#pragma once
// The fidelity suite: a text is given token by token to a reference and to other policies, weights
// or row types, and at every token the next one's distributions are compared. Nothing is generated,
// so an early difference does not grow into another text.
#include <functional>
#include <string>
#include <vector>

#include "clo/engine.h"

namespace clo {

struct FidelityOptions {
  int64_t context_tokens = 4096;  // of a window of the text
  int64_t compared_tokens = 512;  // the last ones of each window; the rest is its prompt
  int64_t windows = 1;            // 0: all that the text has, the last one as short as what is left
};

// A policy on an engine. Engines of one run outlive it; two runs may share one.
struct FidelityRun {
  std::string name;
  Engine* engine = nullptr;
  PolicyOptions policy;
};

struct FidelityOutcome {
  int64_t tokens = 0;
  double nll_sum = 0;  // -log p(token), nats
  int64_t agreed = 0;  // same most likely next token as the reference
  double kl_sum = 0;   // KL(reference || this), nats
  double kl_max = 0;
  // Of all windows together.
  KvCounters counters;
  std::vector<KvCounters> layers;
  int64_t decode_steps = 0, row_bytes = 0, full_row_bytes = 0;
  double decode_seconds = 0;
  std::string kv_type;
  std::vector<QualityReport> quality;  // of each window, where a quality was wanted

  double perplexity() const;
  // Of all windows together; samples is 0 where none was wanted.
  QualityReport mean_quality() const;
};

// How many windows a text of so many tokens is read in.
int64_t num_windows(int64_t text_tokens, const FidelityOptions& options);

// The first of `runs` is the reference. Windows follow each other through `ids`, all as long as
// options say but for the last of all windows, which compares as many tokens as it can. `on_token`
// sees how many tokens of how many have been compared. Fails: kBadRequest when the text is too
// short for the windows, and with the first failed request.
Result<std::vector<FidelityOutcome>> run_fidelity(
    const std::vector<int32_t>& ids, const FidelityOptions& options,
    const std::vector<FidelityRun>& runs,
    const std::function<void(int64_t done, int64_t total)>& on_token);

}  // namespace clo
