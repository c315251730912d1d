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
  request.measure_mass = true;
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
  if (report.quality) outcome.quality.push_back(*report.quality);
  return Ok{};
}

// A part of the text: its first tokens are the prompt, the others are compared.
struct Window {
  int64_t first = 0, prompt = 0, compared = 0;
};

// The windows that options ask for. A rest of one token has nothing to compare. Requires: a text
// that is long enough.
std::vector<Window> windows_of(int64_t text_tokens, const FidelityOptions& options) {
  const int64_t whole =
      options.windows > 0 ? options.windows : text_tokens / options.context_tokens;
  std::vector<Window> windows;
  for (int64_t w = 0; w < whole; ++w) {
    windows.push_back({w * options.context_tokens, options.context_tokens - options.compared_tokens,
                       options.compared_tokens});
  }
  const int64_t rest = text_tokens - whole * options.context_tokens;
  if (options.windows == 0 && rest >= 2) {
    const int64_t compared = std::min(options.compared_tokens, rest - 1);
    windows.push_back({whole * options.context_tokens, rest - compared, compared});
  }
  return windows;
}

Status check_length(int64_t text_tokens, const FidelityOptions& options) {
  const int64_t needed = options.windows > 0 ? options.windows * options.context_tokens : 2;
  if (text_tokens >= needed) return Ok{};
  const std::string what = options.windows > 0
                               ? std::to_string(options.windows) + " window(s) of " +
                                     std::to_string(options.context_tokens) + " need "
                               : "a window needs at least ";
  return Error{
      ErrorCode::kBadRequest,
      "the text has " + std::to_string(text_tokens) + " tokens, " + what + std::to_string(needed),
      "--text"};
}

}  // namespace

int64_t num_windows(int64_t text_tokens, const FidelityOptions& options) {
  return std::ssize(windows_of(text_tokens, options));
}

double FidelityOutcome::perplexity() const {
  return tokens == 0 ? 0 : std::exp(nll_sum / static_cast<double>(tokens));
}

QualityReport FidelityOutcome::mean_quality() const {
  QualityReport mean;
  double squares = 0;  // of the intervals' halves, times the samples
  for (const QualityReport& q : quality) {
    const auto n = static_cast<double>(q.samples);
    mean.wanted = q.wanted;
    mean.samples += q.samples;
    mean.estimated += n * q.estimated;
    squares += std::pow(n * (q.high - q.low) / 2, 2);
    mean.set_scale = q.set_scale;
    mean.angle = q.angle;
  }
  if (mean.samples == 0) return mean;
  const auto all = static_cast<double>(mean.samples);
  mean.estimated /= all;
  mean.low = mean.estimated - std::sqrt(squares) / all;
  mean.high = mean.estimated + std::sqrt(squares) / all;
  return mean;
}

Result<std::vector<FidelityOutcome>> run_fidelity(
    const std::vector<int32_t>& ids, const FidelityOptions& options,
    const std::vector<FidelityRun>& runs,
    const std::function<void(int64_t done, int64_t total)>& on_token) {
  CLO_TRY(check_length(std::ssize(ids), options));
  std::vector<FidelityOutcome> outcomes(runs.size());
  std::vector<Engine*> engines;
  for (const FidelityRun& run : runs) {
    if (std::find(engines.begin(), engines.end(), run.engine) == engines.end()) {
      engines.push_back(run.engine);
    }
  }
  const std::vector<Window> windows = windows_of(std::ssize(ids), options);
  int64_t done = 0, total = 0;
  for (const Window& window : windows) total += window.compared;
  for (const Window& window : windows) {
    const auto first = ids.begin() + window.first;
    const auto middle = first + window.prompt;
    const std::vector<int32_t> prompt(first, middle);
    const std::vector<int32_t> forced(middle, middle + window.compared);
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
        if (on_token) on_token(done, total);
      }
    }
    for (Engine* engine : engines) engine->drop_prefixes();
  }
  return outcomes;
}

}  // namespace clo
