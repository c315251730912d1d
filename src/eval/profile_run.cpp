#include "eval/profile_run.h"

#include <algorithm>

#include "base/try.h"
#include "base/units.h"
#include "kv/memory_plan.h"

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

Status check_recording_room(const KvShape& shape, int64_t windows, const ProfileRun& run,
                            int64_t available_bytes) {
  const int64_t each = WindowTrace::bytes(shape, run.context_tokens - 1, run.decode_tokens - 1);
  if (each * windows <= available_bytes) return Ok{};
  return Error{ErrorCode::kHostMemory,
               "keys and queries of " + std::to_string(windows) + " windows take " +
                   format_bytes(each * windows) + " of host memory, " + format_bytes(each) +
                   " each; there are " + format_bytes(available_bytes) +
                   ": give fewer --windows, a smaller --context or --decode",
               "--windows"};
}

Result<std::vector<WindowTrace>> record_windows(Engine& engine, const KvShape& shape,
                                                TraceRecorder& recorder,
                                                const std::vector<int32_t>& ids,
                                                const ProfileRun& run, const RecordCalls& calls) {
  CLO_ASSIGN(const std::vector<int64_t> starts, window_starts(std::ssize(ids), run));
  CLO_ASSIGN(const PolicyOptions dense, preset("dense"));
  CLO_TRY(check_recording_room(shape, std::ssize(starts), run, available_host_bytes()));
  const int64_t total = std::ssize(starts) * run.context_tokens;
  std::vector<WindowTrace> traces;
  for (const int64_t start : starts) {
    const int64_t before = std::ssize(traces) * run.context_tokens;
    // The last token's logits would be those after the window, so it is not fed.
    const auto first = ids.begin() + start, last = first + run.context_tokens - 1;
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
