#pragma once
// Records a model for a profile: windows of a text, each read as a prompt under dense attention,
// where the queries of adjacent tokens are those that decode steps would have.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "clo/engine.h"
#include "profile/trace.h"

namespace clo {

struct ProfileRun {
  // Of windows: lengths are spread evenly between them, in their logarithms. A hash learns the
  // rotary phases of the positions that its queries have, and is of little use at others.
  int64_t shortest = 1024, longest = 2048;
  int64_t decode_tokens = 256;  // of each, whose queries are kept
  int64_t windows = 8;          // at most; spread evenly over the text, none overlapping
  int64_t runs = 1;             // of adjacent tokens that decode_tokens are parted into

  int64_t run_steps() const { return decode_tokens / runs; }
};

struct TextWindow {
  int64_t first = 0, tokens = 0;
  bool operator==(const TextWindow&) const = default;
};
// As many windows as the text has room for; the last is of the longest length. Fails: kBadRequest
// when it is too short for one; the message says how many tokens it has and how many are needed.
Result<std::vector<TextWindow>> text_windows(int64_t text_tokens, const ProfileRun& run);

// Whether traces of windows of `run` fit in so many bytes of host memory. Fails: kHostMemory, with
// what they take and what there is.
Status check_recording_room(const KvShape& shape, std::span<const TextWindow> windows,
                            const ProfileRun& run, int64_t available_bytes);

struct RecordCalls {
  std::function<void(int64_t tokens_done, int64_t tokens)> on_progress;
  std::function<bool()> keep_going;
};

// f32 keys and queries of all windows are held in host memory: WindowTrace::bytes of each.
// Requires: `recorder` (kPrefill) is the observer of the engine, which runs nothing else and keeps
// no prefixes. Fails: as text_windows(), kHostMemory before anything is recorded, kCancelled, and
// with the first failed request.
Result<std::vector<WindowTrace>> record_windows(Engine& engine, const KvShape& shape,
                                                TraceRecorder& recorder,
                                                const std::vector<int32_t>& ids,
                                                const ProfileRun& run, const RecordCalls& calls);

}  // namespace clo
