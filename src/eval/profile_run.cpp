#include "eval/profile_run.h"

#include <algorithm>

#include "base/try.h"
#include "base/units.h"
#include "kv/memory_plan.h"

namespace clo {

namespace {

constexpr int64_t kWindowsOfALength = 4;

int64_t tokens_of_window(const ProfileRun& run, int64_t window) {
  const auto length = static_cast<size_t>(window / kWindowsOfALength) % run.contexts.size();
  return run.contexts[length];
}

}  // namespace

Result<std::vector<TextWindow>> text_windows(int64_t text_tokens, const ProfileRun& run) {
  const auto lengths = std::ssize(run.contexts);
  const int64_t least = lengths == 1 ? 1 : kWindowsOfALength * lengths;
  if (run.windows < least) {
    return Error{ErrorCode::kBadFlag,
                 "expected at least " + std::to_string(least) + ", four for each of " +
                     std::to_string(lengths) + " lengths, found " + std::to_string(run.windows),
                 "--windows"};
  }
  int64_t count = 0, taken = 0, needed = 0;
  for (int64_t w = 0; w < least; ++w) needed += tokens_of_window(run, w);
  while (count < run.windows && taken + tokens_of_window(run, count) <= text_tokens) {
    taken += tokens_of_window(run, count++);
  }
  if (count < least) {
    return Error{ErrorCode::kBadRequest,
                 "expected at least " + std::to_string(needed) + " tokens, " +
                     (lengths == 1 ? "one window" : "four windows of each length") +
                     " of --context, found " + std::to_string(text_tokens) +
                     "; give more text or a smaller --context",
                 "--text"};
  }
  std::vector<TextWindow> windows;
  int64_t before = 0;
  for (int64_t w = 0; w < count; ++w) {
    const int64_t gaps = count == 1 ? 0 : w * (text_tokens - taken) / (count - 1);
    windows.push_back({before + gaps, tokens_of_window(run, w)});
    before += windows.back().tokens;
  }
  return windows;
}

Status check_recording_room(const KvShape& shape, std::span<const TextWindow> windows,
                            int64_t decode_tokens, int64_t available_bytes) {
  int64_t total = 0;
  for (const TextWindow& window : windows) {
    total += WindowTrace::bytes(shape, window.tokens - 1, decode_tokens - 1);
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
  CLO_TRY(check_recording_room(shape, windows, run.decode_tokens, available_host_bytes()));
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
    recorder.begin(window.tokens - 1, run.decode_tokens - 1);
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
