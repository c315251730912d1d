#pragma once
// What is recorded of a model for a profile: the queries of the last tokens of a window of text,
// fed one by one, and the keys of all its tokens. Keys and queries are f32 and after the rotary
// embedding, as attention sees them.
#include <cstdint>
#include <span>
#include <vector>

#include "attention/decode_observer.h"

namespace clo {

// One KV head's share of a window. The trace that it points into outlives it.
struct HeadWindow {
  std::span<const float> keys;     // [num_tokens, head_dim]
  std::span<const float> queries;  // [group_size, num_steps, head_dim]
  int64_t num_tokens = 0;
  int64_t num_steps = 0;
  int64_t first_context = 0;  // tokens in context at step 0, that step's own included

  int64_t context_of(int64_t step) const { return first_context + step; }
};

class WindowTrace {
 public:
  WindowTrace() = default;
  // Room for `num_steps` decode steps that end at `num_tokens` tokens.
  WindowTrace(const KvShape& shape, int64_t num_tokens, int64_t num_steps);

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_steps() const { return num_steps_; }
  HeadWindow head(int32_t layer, int32_t kv_head) const;
  std::span<float> key(int32_t layer, int32_t kv_head, int64_t token);      // [head_dim]
  std::span<float> query(int32_t layer, int32_t query_head, int64_t step);  // [head_dim]
  static int64_t bytes(const KvShape& shape, int64_t num_tokens, int64_t num_steps);

 private:
  KvShape shape_;
  int64_t num_tokens_ = 0, num_steps_ = 0;
  std::vector<float> keys_;     // [num_layers, num_kv_heads, num_tokens, head_dim]
  std::vector<float> queries_;  // [num_layers, num_q_heads, num_steps, head_dim]
};

// Fills one trace after another from an engine that runs one sequence at a time.
class TraceRecorder : public DecodeObserver {
 public:
  // The next `num_steps` decode steps are recorded; the last of them has `num_tokens` in context.
  void begin(int64_t num_tokens, int64_t num_steps);
  void on_decode(const KvShape& shape, int32_t layer, std::span<const HeadTask> tasks) override;
  // Requires: every step has been seen.
  WindowTrace take();

 private:
  int64_t num_tokens_ = 0, num_steps_ = 0;
  bool started_ = false;
  int64_t calls_ = 0;  // of on_decode: layers x steps
  int32_t num_layers_ = 0;
  WindowTrace trace_;
};

}  // namespace clo
