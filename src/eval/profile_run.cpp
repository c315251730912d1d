#include "eval/profile_run.h"

#include <algorithm>

#include "base/try.h"

namespace clo {

Result<std::vector<int64_t>> window_starts(int64_t text_tokens, const ProfileRun& run) {
  if (text_tokens < run.context_tokens) {
    return Error{ErrorCode::kBadRequest,
                 "expected at least " + std::to_string(run.context_tokens) +
                     " tokens, one window of --context, found " + std::to_string(text_tokens) +
                     "; give more text or a smaller --context",
                 "--text"};
  }
  const int64_t count = std::min(run.windows, text_tokens / run.context_tokens);
  std::vector<int64_t> starts;
  for (int64_t w = 0; w < count; ++w) {
    starts.push_back(count == 1 ? 0 : w * (text_tokens - run.context_tokens) / (count - 1));
  }
  return starts;
}

Result<std::vector<WindowTrace>> record_windows(Engine& engine, TraceRecorder& recorder,
                                                const std::vector<int32_t>& ids,
                                                const ProfileRun& run, const RecordCalls& calls) {
  CLO_ASSIGN(const std::vector<int64_t> starts, window_starts(std::ssize(ids), run));
  CLO_ASSIGN(const PolicyOptions dense, preset("dense"));
  const int64_t total = std::ssize(starts) * run.context_tokens;
  std::vector<WindowTrace> traces;
  for (const int64_t start : starts) {
    const auto first = ids.begin() + start;
    const auto middle = first + run.context_tokens - run.decode_tokens;
    const int64_t before = std::ssize(traces) * run.context_tokens;
    int64_t decoded = 0;
    Request request;
    request.prompt_ids.assign(first, middle);
    request.forced_tokens.assign(middle, first + run.context_tokens);
    request.max_new_tokens = run.decode_tokens;
    request.sampling = SamplingOptions{};
    request.policy = dense;
    request.keep_going = calls.keep_going;
    const auto tell = [&](int64_t tokens) {
      if (calls.on_progress) calls.on_progress(before + tokens, total);
    };
    request.on_progress = [&](const Progress& progress) { tell(progress.done_tokens); };
    request.on_logits = [&](std::span<const float>) {
      tell(run.context_tokens - run.decode_tokens + ++decoded);
    };
    // The last token's logits would be those after the window, so it is not fed.
    recorder.begin(run.context_tokens - 1, run.decode_tokens - 1);
    CLO_ASSIGN(const Response response, engine.generate(std::move(request)));
    if (response.error) return *response.error;
    if (response.finish == FinishReason::kCancelled) {
      return Error{ErrorCode::kCancelled, "stopped: no profile was made", ""};
    }
    traces.push_back(recorder.take());
    engine.drop_prefixes();
  }
  return traces;
}

}  // namespace clo
