#include "profile/trace.h"

#include <algorithm>

#include "base/check.h"
#include "ops/stored_row.h"
#include "tensor/dtype.h"

namespace clo {

namespace {

// The key of a token as it is stored.
void read_key(const KvShape& shape, const HeadTask& task, int64_t token, float* key) {
  const std::byte* row = nullptr;
  if (task.head->is_resident()) {
    row = task.head->resident + token * shape.stored_row_bytes();
  } else {
    row = task.sequence->host_rows[token / kPageTokens] +
          (int64_t{task.kv_head} * kPageTokens + token % kPageTokens) * shape.stored_row_bytes();
  }
  if (!shape.compressed()) {
    convert_to_f32(shape.type, row, key, shape.head_dim);
    return;
  }
  std::vector<float> value(static_cast<size_t>(shape.head_dim));
  expand_row(shape, row, key, value.data());
}

}  // namespace

WindowTrace::WindowTrace(const KvShape& shape, int64_t num_tokens, int64_t num_steps,
                         int64_t num_runs)
    : shape_(shape), num_tokens_(num_tokens), num_steps_(num_steps), num_runs_(num_runs) {
  CLO_CHECK(num_runs >= 1 && num_steps >= 1 && run_end(0) >= num_steps, num_tokens, num_steps,
            num_runs);
  const int64_t dims = int64_t{shape.num_layers} * shape.head_dim;
  keys_.resize(static_cast<size_t>(dims * shape.num_kv_heads * num_tokens));
  queries_.resize(static_cast<size_t>(dims * shape.num_q_heads * num_runs * num_steps));
}

int64_t WindowTrace::bytes(const KvShape& shape, int64_t num_tokens, int64_t all_steps) {
  return int64_t{shape.num_layers} * shape.head_dim * static_cast<int64_t>(sizeof(float)) *
         (shape.num_kv_heads * num_tokens + shape.num_q_heads * all_steps);
}

std::span<float> WindowTrace::key(int32_t layer, int32_t kv_head, int64_t token) {
  const int64_t row = (int64_t{layer} * shape_.num_kv_heads + kv_head) * num_tokens_ + token;
  return {keys_.data() + row * shape_.head_dim, static_cast<size_t>(shape_.head_dim)};
}

std::span<float> WindowTrace::query(int32_t layer, int32_t query_head, int64_t run, int64_t step) {
  const int64_t group = shape_.group_size();
  const int64_t kv_head = int64_t{layer} * shape_.num_kv_heads + query_head / group;
  const int64_t row =
      ((kv_head * num_runs_ + run) * group + query_head % group) * num_steps_ + step;
  return {queries_.data() + row * shape_.head_dim, static_cast<size_t>(shape_.head_dim)};
}

HeadWindow WindowTrace::head(int32_t layer, int32_t kv_head, int64_t run) const {
  const int64_t head = int64_t{layer} * shape_.num_kv_heads + kv_head;
  const int64_t query_size = shape_.group_size() * num_steps_ * shape_.head_dim;
  HeadWindow window;
  window.num_tokens = run_end(run);
  window.num_steps = num_steps_;
  window.first_context = window.num_tokens - num_steps_ + 1;
  window.keys = {keys_.data() + head * num_tokens_ * shape_.head_dim,
                 static_cast<size_t>(window.num_tokens * shape_.head_dim)};
  window.queries = {queries_.data() + (head * num_runs_ + run) * query_size,
                    static_cast<size_t>(query_size)};
  return window;
}

void TraceRecorder::begin(int64_t num_tokens, int64_t num_steps, int64_t num_runs) {
  CLO_CHECK(source_ == Source::kPrefill || num_runs == 1, num_runs);
  num_tokens_ = num_tokens;
  num_steps_ = num_steps;
  num_runs_ = num_runs;
  started_ = false;
  seen_ = 0;
}

void TraceRecorder::start(const KvShape& shape) {
  if (started_) return;
  trace_ = WindowTrace(shape, num_tokens_, num_steps_, num_runs_);
  num_layers_ = shape.num_layers;
  started_ = true;
}

void TraceRecorder::on_prefill(const KvShape& shape, int32_t layer, const PrefillRows& rows) {
  if (source_ != Source::kPrefill) return;
  start(shape);
  const int64_t count = std::min(rows.num_tokens, num_tokens_ - rows.first_token);
  const int64_t query_bytes = shape.head_dim * dtype_bytes(rows.query_type);
  for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
    for (int64_t t = 0; t < count; ++t) {
      convert_to_f32(shape.type, rows.keys + head * rows.key_head_bytes + t * rows.key_token_bytes,
                     trace_.key(layer, head, rows.first_token + t).data(), shape.head_dim);
    }
  }
  for (int64_t run = 0; run < num_runs_; ++run) {
    const int64_t end = trace_.run_end(run) - rows.first_token, begin = end - num_steps_;
    for (int32_t head = 0; head < shape.num_q_heads; ++head) {
      for (int64_t t = std::max<int64_t>(0, begin); t < std::min(count, end); ++t) {
        convert_to_f32(rows.query_type,
                       rows.queries + t * rows.query_token_bytes + head * query_bytes,
                       trace_.query(layer, head, run, t - begin).data(), shape.head_dim);
      }
    }
  }
  seen_ += std::max<int64_t>(count, 0);
}

void TraceRecorder::on_decode(const KvShape& shape, int32_t layer,
                              std::span<const HeadTask> tasks) {
  CLO_CHECK(source_ == Source::kDecode);
  CLO_CHECK(std::ssize(tasks) == shape.num_kv_heads, tasks.size());
  const int64_t context = tasks[0].context_tokens;
  const int64_t step = context - (num_tokens_ - num_steps_ + 1);
  if (step < 0 || step >= num_steps_) return;
  start(shape);
  ++seen_;
  const int32_t group = shape.group_size();
  for (const HeadTask& task : tasks) {
    for (int32_t g = 0; g < group; ++g) {
      std::copy_n(task.query + int64_t{g} * shape.head_dim, shape.head_dim,
                  trace_.query(layer, task.kv_head * group + g, 0, step).begin());
    }
    for (int64_t token = step == 0 ? 0 : context - 1; token < context; ++token) {
      read_key(shape, task, token, trace_.key(layer, task.kv_head, token).data());
    }
  }
}

WindowTrace TraceRecorder::take() {
  const int64_t of_layer = source_ == Source::kPrefill ? num_tokens_ : num_steps_;
  CLO_CHECK(started_ && seen_ == num_layers_ * of_layer, seen_, num_layers_, of_layer);
  return std::move(trace_);
}

}  // namespace clo
