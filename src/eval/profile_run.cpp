#include "eval/profile_run.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/try.h"
#include "base/units.h"
#include "kv/memory_plan.h"

namespace clo {

namespace {

// Lengths of `count` windows, ascending.
std::vector<int64_t> window_lengths(const ProfileRun& run, int64_t count) {
  const double ratio = static_cast<double>(run.longest) / static_cast<double>(run.shortest);
  std::vector<int64_t> lengths;
  for (int64_t w = 0; w < count; ++w) {
    const double at = count == 1 ? 1 : static_cast<double>(w) / static_cast<double>(count - 1);
    lengths.push_back(std::llround(static_cast<double>(run.shortest) * std::pow(ratio, at)));
  }
  return lengths;
}

}  // namespace

Result<std::vector<TextWindow>> text_windows(int64_t text_tokens, const ProfileRun& run) {
  if (text_tokens < run.longest) {
    return Error{ErrorCode::kBadRequest,
                 "expected at least " + std::to_string(run.longest) +
                     " tokens, one window of --context, found " + std::to_string(text_tokens) +
                     "; give more text or a smaller --context",
                 "--text"};
  }
  const auto total = [](const std::vector<int64_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  };
  int64_t count = run.windows;
  std::vector<int64_t> lengths = window_lengths(run, count);
  while (total(lengths) > text_tokens) lengths = window_lengths(run, --count);
  const int64_t rest = text_tokens - total(lengths);
  std::vector<TextWindow> windows;
  int64_t before = 0;
  for (int64_t w = 0; w < count; ++w) {
    const int64_t gaps = count == 1 ? 0 : w * rest / (count - 1);
    windows.push_back({before + gaps, lengths[static_cast<size_t>(w)]});
    before += windows.back().tokens;
  }
  return windows;
}

Status check_recording_room(const KvShape& shape, std::span<const TextWindow> windows,
                            const ProfileRun& run, int64_t available_bytes) {
  int64_t total = 0;
  for (const TextWindow& window : windows) {
    total += WindowTrace::bytes(shape, window.tokens - 1, run.run_steps() * run.runs);
  }
  if (total <= available_bytes) return Ok{};
  return Error{ErrorCode::kHostMemory,
               "keys and queries of " + std::to_string(windows.size()) + " windows take " +
                   format_bytes(total) + " of host memory; there are " +
                   format_bytes(available_bytes) +
                   ": give fewer --windows, a smaller --context or --decode",
               "--windows"};
}

Result<std::vector<WindowTrace>> record_windows(Engine& engine, const KvShape& shape,
                                                TraceRecorder& recorder,
                                                const std::vector<int32_t>& ids,
                                                const ProfileRun& run, const RecordCalls& calls) {
  CLO_ASSIGN(const std::vector<TextWindow> windows, text_windows(std::ssize(ids), run));
  CLO_ASSIGN(const PolicyOptions dense, preset("dense"));
  CLO_TRY(check_recording_room(shape, windows, run, available_host_bytes()));
  int64_t total = 0, before = 0;
  for (const TextWindow& window : windows) total += window.tokens;
  std::vector<WindowTrace> traces;
  for (const TextWindow& window : windows) {
    // The last token's logits would be those after the window, so it is not fed.
    const auto first = ids.begin() + window.first, last = first + window.tokens - 1;
    Request request;
    request.prompt_ids.assign(first, last);
    request.forced_tokens.assign(last, last + 1);
    request.max_new_tokens = 1;
    request.sampling = SamplingOptions{};
    request.policy = dense;
    request.keep_going = calls.keep_going;
    request.on_progress = [&](const Progress& progress) {
      if (calls.on_progress) calls.on_progress(before + progress.done_tokens, total);
    };
    recorder.begin(window.tokens - 1, run.run_steps(), run.runs);
    CLO_ASSIGN(const Response response, engine.generate(std::move(request)));
    if (response.error) return *response.error;
    if (response.finish == FinishReason::kCancelled) {
      return Error{ErrorCode::kCancelled, "stopped: no profile was made", ""};
    }
    traces.push_back(recorder.take());
    before += window.tokens;
    engine.drop_prefixes();
  }
  return traces;
}

}  // namespace clo
