#include "cuda/hash_trainer.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"
#include "device/device_facts.h"
#include "device/device_memory.h"
#include "device/stream.h"
#include "kernels/train/train.h"

namespace clo {

namespace {

// Device memory as an array.
template <typename T>
class DeviceValues {
 public:
  Status take(int64_t count) {
    CLO_ASSIGN(block_, DeviceBlock::create(std::max<int64_t>(count, 1) * int64_t{sizeof(T)}));
    return Ok{};
  }
  T* data() const { return reinterpret_cast<T*>(block_.data()); }
  int64_t num_bytes() const { return block_.num_bytes(); }
  void upload(int64_t at, std::span<const T> values, const Stream& stream) const {
    CLO_CUDA(cudaMemcpyAsync(data() + at, values.data(), values.size_bytes(),
                             cudaMemcpyHostToDevice, stream.get()));
  }
  void clear(const Stream& stream) const {
    CLO_CUDA(
        cudaMemsetAsync(block_.data(), 0, static_cast<size_t>(block_.num_bytes()), stream.get()));
  }

 private:
  DeviceBlock block_;
};

class DeviceHashTrainer final : public HashTrainer {
 public:
  DeviceHashTrainer(const HashTrainerShape& shape, int64_t heads)
      : shape_(shape), plan_(plan_hash_trainer(shape)), heads_(heads) {}

  Status take_memory() {
    CLO_TRY(keys_.take(heads_ * plan_.head_keys));
    CLO_TRY(queries_.take(heads_ * plan_.head_queries));
    CLO_TRY(labels_.take(heads_ * plan_.head_labels));
    for (DeviceValues<float>* values : {&weights_, &mean_, &square_}) {
      CLO_TRY(values->take(heads_ * plan_.head_weights));
    }
    CLO_TRY(codes_.take(heads_ * plan_.head_codes));
    CLO_TRY(scores_.take(heads_ * plan_.head_scores));
    mean_.clear(stream_);
    square_.clear(stream_);
    return Ok{};
  }

  void load(int64_t head, size_t window, std::span<const float> keys,
            std::span<const float> queries, std::span<const uint64_t> labels) override {
    CLO_CHECK(head >= 0 && head < heads_ && window < shape_.windows.size(), head, window);
    const HashTrainerShape::Window& sizes = shape_.windows[window];
    CLO_CHECK(std::ssize(keys) == sizes.num_keys * shape_.width, keys.size());
    CLO_CHECK(std::ssize(queries) == sizes.num_steps * shape_.width, queries.size());
    CLO_CHECK(std::ssize(labels) == sizes.num_steps * divide_up(sizes.num_keys, 64), labels.size());
    keys_.upload(head * plan_.head_keys + plan_.keys[window], keys, stream_);
    queries_.upload(head * plan_.head_queries + plan_.queries[window], queries, stream_);
    labels_.upload(head * plan_.head_labels + plan_.labels[window], labels, stream_);
    stream_.synchronize();  // the copies read the caller's memory
  }

  void start(int64_t head, std::span<const float> weights) override {
    CLO_CHECK(head >= 0 && head < heads_, head);
    CLO_CHECK(std::ssize(weights) == plan_.head_weights, weights.size());
    weights_.upload(head * plan_.head_weights, weights, stream_);
    stream_.synchronize();
  }

  void step(const HashBatch& batch, const AdamStep& adam) override {
    CLO_CHECK(batch.window < shape_.windows.size(), batch.window);
    const HashTrainerShape::Window& window = shape_.windows[batch.window];
    CLO_CHECK(batch.first_key >= 0 && batch.first_key + batch.num_keys <= window.num_keys,
              batch.first_key, batch.num_keys);
    kernels::HashTrainStep step;
    step.heads = static_cast<int32_t>(heads_);
    step.width = shape_.width;
    step.bits = shape_.bits;
    step.num_keys = static_cast<int32_t>(batch.num_keys);
    step.keys = keys_.data() + plan_.keys[batch.window] + batch.first_key * shape_.width;
    step.queries = queries_.data() + plan_.queries[batch.window];
    step.labels = labels_.data() + plan_.labels[batch.window];
    step.head_keys = plan_.head_keys;
    step.head_queries = plan_.head_queries;
    step.head_labels = plan_.head_labels;
    step.num_steps = window.num_steps;
    step.label_words = divide_up(window.num_keys, 64);
    step.first_key = batch.first_key;
    for (int i = 0; i < kBatchQueries; ++i) {
      const int64_t at = batch.steps[static_cast<size_t>(i)];
      CLO_CHECK(at >= 0 && at < window.num_steps, at);
      step.steps[i] = static_cast<int32_t>(at);
    }
    step.weights = weights_.data();
    step.mean = mean_.data();
    step.square = square_.data();
    step.codes = codes_.data();
    step.scores = scores_.data();
    step.adam = adam;
    kernels::hash_train_step(step, stream_.get());
  }

  void wait() override { stream_.synchronize(); }

  std::vector<float> weights(int64_t head) override {
    CLO_CHECK(head >= 0 && head < heads_, head);
    std::vector<float> values(static_cast<size_t>(plan_.head_weights));
    CLO_CUDA(cudaMemcpyAsync(values.data(), weights_.data() + head * plan_.head_weights,
                             values.size() * sizeof(float), cudaMemcpyDeviceToHost, stream_.get()));
    stream_.synchronize();
    return values;
  }

  int64_t num_bytes() const override {
    return keys_.num_bytes() + queries_.num_bytes() + labels_.num_bytes() + weights_.num_bytes() +
           mean_.num_bytes() + square_.num_bytes() + codes_.num_bytes() + scores_.num_bytes();
  }

 private:
  HashTrainerShape shape_;
  HashTrainerPlan plan_;
  int64_t heads_;
  DeviceValues<float> keys_, queries_, weights_, mean_, square_, codes_, scores_;
  DeviceValues<uint64_t> labels_;
  Stream stream_;
};

}  // namespace

Result<int64_t> HashTrainer::heads_that_fit(const HashTrainerShape& shape, int64_t limit_bytes) {
  CLO_ASSIGN(const DeviceFacts facts, device_facts());
  const HashTrainerPlan plan = plan_hash_trainer(shape);
  int64_t room = facts.free_memory_bytes / 10 * 9;
  if (limit_bytes > 0) room = std::min(room, limit_bytes);
  const int64_t heads = room / plan.head_bytes;
  if (heads == 0) {
    return Error{ErrorCode::kDeviceMemory,
                 "training one head takes " + format_bytes(plan.head_bytes) + ", there are " +
                     format_bytes(room) +
                     "; fewer --windows or a smaller --context need less, and --backend cpu none",
                 "--device-memory"};
  }
  return heads;
}

Result<std::unique_ptr<HashTrainer>> HashTrainer::create(const HashTrainerShape& shape,
                                                         int64_t heads) {
  CLO_CHECK(heads >= 1, heads);
  if (const auto facts = device_facts(); !facts) return facts.error();
  auto trainer = std::make_unique<DeviceHashTrainer>(shape, heads);
  CLO_TRY(trainer->take_memory());
  return std::unique_ptr<HashTrainer>(std::move(trainer));
}

}  // namespace clo
