#include "eval/fidelity.h"

#include <algorithm>
#include <cmath>
#include <deque>

#include "base/try.h"
#include "eval/distributions.h"

namespace clo {

namespace {

// One request and the rows that it gave and nobody has looked at.
struct Lane {
  const FidelityRun* run = nullptr;
  RequestId id = 0;
  std::deque<std::vector<float>> rows;
  bool finished = false;
};

void compare(std::span<const float> reference, std::span<const float> row, int32_t token,
             FidelityOutcome& outcome) {
  ++outcome.tokens;
  outcome.nll_sum += log_sum_exp(row) - static_cast<double>(row[static_cast<size_t>(token)]);
  outcome.agreed += most_likely(reference) == most_likely(row);
  const double kl = kl_divergence(reference, row);
  outcome.kl_sum += kl;
  outcome.kl_max = std::max(outcome.kl_max, kl);
}

Status submit(Lane& lane, std::vector<int32_t> prompt, const std::vector<int32_t>& forced) {
  Request request;
  request.prompt_ids = std::move(prompt);
  request.forced_tokens = forced;
  request.max_new_tokens = std::ssize(forced);
  request.sampling = SamplingOptions{};
  request.policy = lane.run->policy;
  request.measure_mass = lane.run->engine->can_measure_mass();
  request.on_logits = [&lane](std::span<const float> row) {
    lane.rows.emplace_back(row.begin(), row.end());
  };
  CLO_ASSIGN(lane.id, lane.run->engine->submit(std::move(request)));
  return Ok{};
}

Status finish(Lane& lane, FidelityOutcome& outcome) {
  auto response = lane.run->engine->take(lane.id);
  if (!response) return Ok{};
  lane.finished = true;
  if (response->error) return *response->error;
  const Report& report = response->report;
  outcome.counters += report.total;
  outcome.layers.resize(report.layers.size());
  for (size_t i = 0; i < report.layers.size(); ++i) outcome.layers[i] += report.layers[i];
  outcome.decode_steps += report.decode_steps;
  outcome.decode_seconds += report.decode_seconds;
  outcome.row_bytes = report.row_bytes;
  outcome.full_row_bytes = report.full_row_bytes;
  outcome.kv_type = report.kv_type;
  return Ok{};
}

}  // namespace

double FidelityOutcome::perplexity() const {
  return tokens == 0 ? 0 : std::exp(nll_sum / static_cast<double>(tokens));
}

Result<std::vector<FidelityOutcome>> run_fidelity(
    const std::vector<int32_t>& ids, const FidelityOptions& options,
    const std::vector<FidelityRun>& runs,
    const std::function<void(int64_t done, int64_t total)>& on_token) {
  if (std::ssize(ids) < options.windows * options.context_tokens) {
    return Error{ErrorCode::kBadRequest,
                 "the text has " + std::to_string(ids.size()) + " tokens, " +
                     std::to_string(options.windows) + " window(s) of " +
                     std::to_string(options.context_tokens) + " need " +
                     std::to_string(options.windows * options.context_tokens),
                 "--text"};
  }
  std::vector<FidelityOutcome> outcomes(runs.size());
  std::vector<Engine*> engines;
  for (const FidelityRun& run : runs) {
    if (std::find(engines.begin(), engines.end(), run.engine) == engines.end()) {
      engines.push_back(run.engine);
    }
  }
  const int64_t prompt_tokens = options.context_tokens - options.compared_tokens;
  int64_t done = 0;
  for (int64_t window = 0; window < options.windows; ++window) {
    const auto first = ids.begin() + window * options.context_tokens;
    const std::vector<int32_t> prompt(first, first + prompt_tokens);
    const std::vector<int32_t> forced(first + prompt_tokens, first + options.context_tokens);
    std::vector<Lane> lanes(runs.size());
    for (size_t r = 0; r < runs.size(); ++r) {
      lanes[r].run = &runs[r];
      CLO_TRY(submit(lanes[r], prompt, forced));
    }
    size_t compared = 0;
    const auto ready = [](const Lane& lane) { return !lane.rows.empty(); };
    const auto running = [](const Lane& lane) { return !lane.finished; };
    while (std::any_of(lanes.begin(), lanes.end(), running)) {
      for (Engine* engine : engines) engine->step();
      for (size_t r = 0; r < lanes.size(); ++r) {
        if (!lanes[r].finished) CLO_TRY(finish(lanes[r], outcomes[r]));
      }
      while (std::all_of(lanes.begin(), lanes.end(), ready)) {
        const int32_t token = forced[compared++];
        const std::vector<float> reference = std::move(lanes.front().rows.front());
        for (size_t r = 0; r < lanes.size(); ++r) {
          compare(reference, r == 0 ? std::span<const float>(reference) : lanes[r].rows.front(),
                  token, outcomes[r]);
          lanes[r].rows.pop_front();
        }
        ++done;
        if (on_token) on_token(done, options.windows * options.compared_tokens);
      }
    }
    for (Engine* engine : engines) engine->drop_prefixes();
  }
  return outcomes;
}

}  // namespace clo
