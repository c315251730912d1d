#pragma once
// What is recorded of a model for a profile: the keys of all tokens of a window of text, and the
// queries of runs of adjacent tokens, spread over its second half. Under dense attention a token's
// query is the same whether it is read as part of a prompt or fed alone, so the queries of adjacent
// tokens are those of adjacent decode steps. Keys and queries are f32 and after the rotary
// embedding, as attention sees them.
#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention_observer.h"

namespace clo {

// One KV head's share of a run: its queries, and the keys of the window up to its last step. The
// trace that it points into outlives it; the keys of a window's runs begin at one place.
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
  // Room for runs of `num_steps` steps. Their ends part the second half of the window evenly; the
  // last is that of the window, with `num_tokens` tokens in context.
  WindowTrace(const KvShape& shape, int64_t num_tokens, int64_t num_steps, int64_t num_runs = 1);

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_steps() const { return num_steps_; }  // of a run
  int64_t num_runs() const { return num_runs_; }
  // Tokens in context at the last step of a run.
  int64_t run_end(int64_t run) const {
    return num_tokens_ - (num_runs_ - 1 - run) * (num_tokens_ / 2) / num_runs_;
  }
  HeadWindow head(int32_t layer, int32_t kv_head, int64_t run) const;
  std::span<float> key(int32_t layer, int32_t kv_head, int64_t token);  // [head_dim]
  std::span<float> query(int32_t layer, int32_t query_head, int64_t run, int64_t step);
  // `all_steps`: of all runs.
  static int64_t bytes(const KvShape& shape, int64_t num_tokens, int64_t all_steps);

 private:
  KvShape shape_;
  int64_t num_tokens_ = 0, num_steps_ = 0, num_runs_ = 1;
  std::vector<float> keys_;  // [num_layers, num_kv_heads, num_tokens, head_dim]
  std::vector<float>
      queries_;  // [num_layers, num_kv_heads, num_runs, group_size, num_steps, head_dim]
};

// Fills one trace after another from an engine that runs one sequence at a time and keeps no
// prefixes.
class TraceRecorder : public AttentionObserver {
 public:
  // kPrefill: all tokens are read as a prompt, on any backend; keys are those of full rows.
  // kDecode: the steps are decode steps of any policy, on the CPU backend; keys are those that are
  // stored, which differ from full rows' where rows are compressed.
  enum class Source : uint8_t { kPrefill, kDecode };
  explicit TraceRecorder(Source source = Source::kPrefill) : source_(source) {}

  // As a WindowTrace of these numbers. Requires: one run with kDecode.
  void begin(int64_t num_tokens, int64_t num_steps, int64_t num_runs = 1);
  bool watches_decode() const override { return source_ == Source::kDecode; }
  void on_prefill(const KvShape& shape, int32_t layer, const PrefillRows& rows) override;
  void on_decode(const KvShape& shape, int32_t layer, std::span<const HeadTask> tasks) override;
  // Requires: every step has been seen.
  WindowTrace take();

 private:
  void start(const KvShape& shape);

  Source source_;
  int64_t num_tokens_ = 0, num_steps_ = 0, num_runs_ = 1;
  bool started_ = false;
  int64_t seen_ = 0;  // layers x tokens of kPrefill, layers x steps of kDecode
  int32_t num_layers_ = 0;
  WindowTrace trace_;
};

}  // namespace clo
