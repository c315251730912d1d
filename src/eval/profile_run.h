#pragma once
// Records a model for a profile: windows of a text, each read as a prompt under dense attention,
// where the queries of adjacent tokens are those that decode steps would have.
#include <cstdint>
#include <functional>
#include <vector>

#include "clo/engine.h"
#include "profile/trace.h"

namespace clo {

struct ProfileRun {
  int64_t context_tokens = 2048;  // of a window
  int64_t decode_tokens = 512;    // the last ones of it, whose queries are kept
  int64_t windows = 8;            // at most; spread evenly over the text, none overlapping
};

// Where the windows begin. Fails: kBadRequest when the text is too short for one; the message says
// how many tokens it has and how many are needed.
Result<std::vector<int64_t>> window_starts(int64_t text_tokens, const ProfileRun& run);

// Whether traces of so many windows fit in so many bytes of host memory. Fails: kHostMemory, with
// what they take and what there is.
Status check_recording_room(const KvShape& shape, int64_t windows, const ProfileRun& run,
                            int64_t available_bytes);

struct RecordCalls {
  std::function<void(int64_t tokens_done, int64_t tokens)> on_progress;
  std::function<bool()> keep_going;
};

// f32 keys and queries of all windows are held in host memory: WindowTrace::bytes of each.
// Requires: `recorder` (kPrefill) is the observer of the engine, which runs nothing else and keeps
// no prefixes. Fails: as window_starts(), kHostMemory before anything is recorded, kCancelled, and
// with the first failed request.
Result<std::vector<WindowTrace>> record_windows(Engine& engine, const KvShape& shape,
                                                TraceRecorder& recorder,
                                                const std::vector<int32_t>& ids,
                                                const ProfileRun& run, const RecordCalls& calls);

}  // namespace clo
