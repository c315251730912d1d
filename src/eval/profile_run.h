#pragma once
// Records a model for a profile: windows of a text, the first part of each as a prompt and the rest
// fed token by token under dense attention, so that true queries of adjacent steps are seen.
#include <cstdint>
#include <functional>
#include <vector>

#include "clo/engine.h"
#include "profile/trace.h"

namespace clo {

struct ProfileRun {
  int64_t context_tokens = 2048;  // of a window
  int64_t decode_tokens = 512;    // the last ones of it, fed one by one
  int64_t windows = 8;            // at most; spread evenly over the text, none overlapping
};

// Where the windows begin. Fails: kBadRequest when the text is too short for one; the message says
// how many tokens it has and how many are needed.
Result<std::vector<int64_t>> window_starts(int64_t text_tokens, const ProfileRun& run);

struct RecordCalls {
  std::function<void(int64_t tokens_done, int64_t tokens)> on_progress;
  std::function<bool()> keep_going;
};

// Requires: `recorder` is the engine's observer, which runs nothing else.
// Fails: as window_starts(), kCancelled, and with the first failed request.
Result<std::vector<WindowTrace>> record_windows(Engine& engine, TraceRecorder& recorder,
                                                const std::vector<int32_t>& ids,
                                                const ProfileRun& run, const RecordCalls& calls);

}  // namespace clo
