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

WindowTrace::WindowTrace(const KvShape& shape, int64_t num_tokens, int64_t num_steps)
    : shape_(shape), num_tokens_(num_tokens), num_steps_(num_steps) {
  const int64_t dims = int64_t{shape.num_layers} * shape.head_dim;
  keys_.resize(static_cast<size_t>(dims * shape.num_kv_heads * num_tokens));
  queries_.resize(static_cast<size_t>(dims * shape.num_q_heads * num_steps));
}

int64_t WindowTrace::bytes(const KvShape& shape, int64_t num_tokens, int64_t num_steps) {
  return int64_t{shape.num_layers} * shape.head_dim * static_cast<int64_t>(sizeof(float)) *
         (shape.num_kv_heads * num_tokens + shape.num_q_heads * num_steps);
}

std::span<float> WindowTrace::key(int32_t layer, int32_t kv_head, int64_t token) {
  const int64_t row = (int64_t{layer} * shape_.num_kv_heads + kv_head) * num_tokens_ + token;
  return {keys_.data() + row * shape_.head_dim, static_cast<size_t>(shape_.head_dim)};
}

std::span<float> WindowTrace::query(int32_t layer, int32_t query_head, int64_t step) {
  const int64_t row = (int64_t{layer} * shape_.num_q_heads + query_head) * num_steps_ + step;
  return {queries_.data() + row * shape_.head_dim, static_cast<size_t>(shape_.head_dim)};
}

HeadWindow WindowTrace::head(int32_t layer, int32_t kv_head) const {
  const int64_t head = int64_t{layer} * shape_.num_kv_heads + kv_head;
  const int64_t key_size = num_tokens_ * shape_.head_dim;
  const int64_t query_size = shape_.group_size() * num_steps_ * shape_.head_dim;
  HeadWindow window;
  window.keys = {keys_.data() + head * key_size, static_cast<size_t>(key_size)};
  window.queries = {queries_.data() + head * query_size, static_cast<size_t>(query_size)};
  window.num_tokens = num_tokens_;
  window.num_steps = num_steps_;
  window.first_context = num_tokens_ - num_steps_ + 1;
  return window;
}

void TraceRecorder::begin(int64_t num_tokens, int64_t num_steps) {
  CLO_CHECK(num_steps >= 1 && num_tokens >= num_steps, num_tokens, num_steps);
  num_tokens_ = num_tokens;
  num_steps_ = num_steps;
  started_ = false;
  calls_ = 0;
}

void TraceRecorder::on_decode(const KvShape& shape, int32_t layer,
                              std::span<const HeadTask> tasks) {
  CLO_CHECK(std::ssize(tasks) == shape.num_kv_heads, tasks.size());
  const int64_t context = tasks[0].context_tokens;
  const int64_t step = context - (num_tokens_ - num_steps_ + 1);
  if (step < 0 || step >= num_steps_) return;
  if (!started_) {
    trace_ = WindowTrace(shape, num_tokens_, num_steps_);
    num_layers_ = shape.num_layers;
    started_ = true;
  }
  ++calls_;
  const int32_t group = shape.group_size();
  for (const HeadTask& task : tasks) {
    for (int32_t g = 0; g < group; ++g) {
      std::copy_n(task.query + int64_t{g} * shape.head_dim, shape.head_dim,
                  trace_.query(layer, task.kv_head * group + g, step).begin());
    }
    for (int64_t token = step == 0 ? 0 : context - 1; token < context; ++token) {
      read_key(shape, task, token, trace_.key(layer, task.kv_head, token).data());
    }
  }
}

WindowTrace TraceRecorder::take() {
  CLO_CHECK(calls_ == num_layers_ * num_steps_ && calls_ > 0, calls_, num_steps_);
  return std::move(trace_);
}

}  // namespace clo
