#pragma once
// A decode step for tests of attention: rows of sequences with every kind of head, as device tables
// and as the CPU backend sees them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/attend/attend.h"
#include "kernels/gpu_test.h"
#include "kv/head_cache.h"
#include "ops/stored_row.h"
#include "reference/cpu_ops.h"

namespace clo::kernels {
inline namespace attend_step {  // other tests have worlds of their own

enum class HeadKind : uint8_t { kEvictable, kResidentSet, kResidentAll };

// One head cache: in host memory for the CPU, copied as a block to the device.
class Head {
 public:
  Head(const KvShape& shape, const HeadCacheSpec& spec)
      : bytes_(head_cache_bytes(shape, spec)),
        host_(static_cast<std::byte*>(
            ::operator new (static_cast<size_t>(bytes_), std::align_val_t{64}))),
        device_(bytes_) {
    std::memset(host_, 0xFF, static_cast<size_t>(bytes_));  // NaN wherever nothing is written
    view = bind_head_cache(shape, spec, host_);
  }
  ~Head() { ::operator delete (host_, std::align_val_t{64}); }
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;

  void upload() { device_.upload(std::span<const std::byte>(host_, static_cast<size_t>(bytes_))); }
  HeadCacheView device_view() const {
    HeadCacheView moved = view;
    const auto move = [&](auto& pointer) {
      if (pointer == nullptr) return;
      const auto offset = reinterpret_cast<const std::byte*>(pointer) - host_;
      pointer =
          reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(device_.data() + offset);
    };
    move(moved.sink), move(moved.ring), move(moved.slots), move(moved.resident);
    move(moved.slot_token), move(moved.held), move(moved.label), move(moved.state);
    return moved;
  }
  HeadState* device_state() const { return device_view().state; }

  HeadCacheView view;

 private:
  int64_t bytes_;
  std::byte* host_;
  DeviceArray<std::byte> device_;
};

// A step of several rows, one sequence each, in layer 1 of 2.
class Step {
 public:
  struct Row {
    int64_t context = 1;
    HeadKind kind = HeadKind::kEvictable;
    bool active = true;
    PredictRule predict = PredictRule::kNone;
    MassLooks looks = MassLooks::kNone;
    float entropy_rise = 0;
  };
  static constexpr int32_t kLayer = 1, kSink = 4, kRing = 24, kRecent = 16;

  Step(int head_dim, int group, int kv_heads, std::vector<Row> rows, DType type = DType::kBF16,
       RowFormat stored = RowFormat::kFull)
      : rows_(std::move(rows)), num_rows_(static_cast<int32_t>(std::ssize(rows_))) {
    shape_ = {2, kv_heads * group, kv_heads, head_dim, type, 128, stored};
    const int64_t table = int64_t{num_rows_} * shape_.num_layers * kv_heads;
    std::vector<HeadCacheView> views(static_cast<size_t>(table));
    std::vector<BatchSlot> slots(static_cast<size_t>(num_rows_));
    std::vector<int32_t> row_slot(static_cast<size_t>(num_rows_));
    for (int32_t r = 0; r < num_rows_; ++r) {
      // Slots in another order than rows, so that a kernel cannot mix them up unseen.
      const int32_t slot_index = num_rows_ - 1 - r;
      const Row& row = rows_[static_cast<size_t>(r)];
      row_slot[static_cast<size_t>(r)] = row.active || r % 2 == 0 ? slot_index : -1;
      BatchSlot& slot = slots[static_cast<size_t>(slot_index)];
      slot.num_tokens = row.context - 1;
      slot.capacity_tokens = row.context + 100;
      slot.active = row.active ? 1 : 0;
      slot.rules.set_tokens = row.context / 3 + 1;
      slot.rules.sink = kSink;
      slot.rules.recent = kRecent;
      slot.rules.predict = row.predict;
      slot.rules.looks = row.looks;
      slot.rules.entropy_rise = slot.rules.entropy_rise_ahead = row.entropy_rise;
      if (row.kind == HeadKind::kResidentAll) slot.rules.select = SelectRule::kNone;
      for (int32_t h = 0; h < kv_heads; ++h) {
        heads_.push_back(make_head(row, slot.rules.set_tokens, r * 64 + h));
        views[index(slot_index, h)] = heads_.back()->device_view();
      }
    }
    slots_ = std::make_unique<DeviceArray<BatchSlot>>(slots);
    row_slot_ = std::make_unique<DeviceArray<int32_t>>(row_slot);
    views_ = std::make_unique<DeviceArray<HeadCacheView>>(views);
    rules_ =
        std::make_unique<DeviceArray<HeadRule>>(std::vector<HeadRule>(static_cast<size_t>(table)));
    pending_ = std::make_unique<DeviceArray<uint32_t>>(
        std::vector<uint32_t>(static_cast<size_t>(table), 0));
    counters_ = std::make_unique<DeviceArray<DeviceCounters>>(
        std::vector<DeviceCounters>(static_cast<size_t>(num_rows_ * shape_.num_layers)));
    queue_ = std::make_unique<DeviceArray<RefreshQueue>>(std::vector<RefreshQueue>(1));
    jobs_ = std::make_unique<DeviceArray<RefreshJob>>(std::vector<RefreshJob>(kNumRings * kJobs));
    queries_host_ = random_floats(int64_t{num_rows_} * width(), 99, 1.5f);
    queries_ = std::make_unique<DeviceArray<float>>(queries_host_);
    // Of some heads the set is said to be chosen in this step: what was read of it early is stale.
    std::vector<uint32_t> decided(static_cast<size_t>(table), 0);
    for (size_t i = 0; i < decided.size(); i += 3) decided[i] = kChosenNow;
    decided_ = std::make_unique<DeviceArray<uint32_t>>(decided);
    HeadEntropy unknown;
    std::fill_n(unknown.last, kMaxGroup, NAN);
    std::fill_n(unknown.at_label, kMaxGroup, NAN);
    entropies_ = std::make_unique<DeviceArray<HeadEntropy>>(
        std::vector<HeadEntropy>(static_cast<size_t>(table), unknown));
    out_ = std::make_unique<DeviceArray<uint16_t>>(int64_t{num_rows_} * width());
    lse_ = std::make_unique<DeviceArray<float>>(int64_t{num_rows_} * shape_.num_q_heads);
    arrivals_ = std::make_unique<DeviceArray<uint32_t>>(
        std::vector<uint32_t>(static_cast<size_t>(num_rows_ * kv_heads), 0));
  }

  AttendRows params(int32_t grid) {
    parts_ =
        std::make_unique<DeviceArray<float>>(attend_parts(grid, num_rows_, shape_.num_kv_heads) *
                                             shape_.group_size() * (shape_.head_dim + 2));
    AttendRows p;
    p.tables.shape = shape_;
    p.tables.max_batch = num_rows_;
    p.tables.scale = scale();
    p.tables.slots = slots_->data();
    p.tables.row_slot = row_slot_->data();
    p.tables.heads = views_->data();
    p.tables.rules = rules_->data();
    p.tables.pending = pending_->data();
    p.tables.counters = counters_->data();
    p.tables.decided = decided_->data();
    p.tables.entropies = entropies_->data();
    p.tables.queue = queue_->data();
    p.tables.jobs = jobs_->data();
    p.tables.queue_capacity = kJobs;
    p.queries = queries_->data();
    p.out = out_->data();
    p.log_sum_exp = lse_->data();
    p.parts = parts_->data();
    p.arrivals = arrivals_->data();
    p.layer = kLayer;
    p.rows = num_rows_;
    p.grid = grid;
    return p;
  }
  void run(int32_t grid) {
    attend(params(grid), nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
  }

  struct Expected {
    std::vector<float> out, lse;
    std::vector<float> min_entropy;  // [rows, query heads]
    std::vector<int64_t> rows_read;  // [rows, KV heads]
  };
  // The CPU's answer; rows without a sequence are zero.
  Expected expect() {
    Expected e;
    e.out.assign(queries_host_.size(), 0.0f);
    e.lse.assign(static_cast<size_t>(num_rows_ * shape_.num_q_heads), -INFINITY);
    e.min_entropy.assign(e.lse.size(), NAN);
    e.rows_read.assign(static_cast<size_t>(num_rows_ * shape_.num_kv_heads), 0);
    const int64_t group = shape_.group_size();
    CpuOps ops(2);
    for (int32_t i = 0; i < num_rows_ * shape_.num_kv_heads; ++i) {
      const Row& row = rows_[static_cast<size_t>(i / shape_.num_kv_heads)];
      if (!row.active) continue;
      HeadTask task;
      task.head = &heads_[static_cast<size_t>(i)]->view;
      task.query = queries_host_.data() + i * group * shape_.head_dim;
      task.out = e.out.data() + i * group * shape_.head_dim;
      task.context_tokens = row.context;
      task.attend_all = row.kind == HeadKind::kResidentAll;
      AttendParams p;
      p.shape = shape_;
      p.tasks = &task;
      p.num_tasks = 1;
      p.scale = scale();
      p.log_sum_exp = e.lse.data() + i * group;
      p.min_entropy = e.min_entropy.data() + i * group;
      p.rows_read = e.rows_read.data() + i;
      ops.attend(p);
    }
    return e;
  }

  size_t index(int32_t slot, int32_t kv_head) const {
    return static_cast<size_t>((slot * shape_.num_layers + kLayer) * shape_.num_kv_heads + kv_head);
  }
  int64_t width() const { return int64_t{shape_.num_q_heads} * shape_.head_dim; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }
  Head& head(int32_t row, int32_t kv_head) {
    return *heads_[static_cast<size_t>(row * shape_.num_kv_heads + kv_head)];
  }

  std::vector<Row> rows_;
  int32_t num_rows_ = 0;
  KvShape shape_;
  static constexpr uint32_t kJobs = 256;
  std::vector<std::unique_ptr<Head>> heads_;
  std::vector<float> queries_host_;
  std::unique_ptr<DeviceArray<BatchSlot>> slots_;
  std::unique_ptr<DeviceArray<int32_t>> row_slot_;
  std::unique_ptr<DeviceArray<HeadCacheView>> views_;
  std::unique_ptr<DeviceArray<HeadRule>> rules_;
  std::unique_ptr<DeviceArray<uint32_t>> pending_, decided_, arrivals_;
  std::unique_ptr<DeviceArray<HeadEntropy>> entropies_;
  std::unique_ptr<DeviceArray<DeviceCounters>> counters_;
  std::unique_ptr<DeviceArray<RefreshQueue>> queue_;
  std::unique_ptr<DeviceArray<RefreshJob>> jobs_;
  std::unique_ptr<DeviceArray<float>> queries_, lse_, parts_;
  std::unique_ptr<DeviceArray<uint16_t>> out_;

 private:
  // Rows that a head may read are random; slots of holes and slots past the used ones stay NaN, so
  // that a masked row that is read shows.
  std::unique_ptr<Head> make_head(const Row& row, int64_t set_tokens, uint64_t seed) {
    HeadCacheSpec spec;
    spec.sink_tokens = kSink;
    spec.ring_tokens = kRing;
    spec.capacity_tokens = row.context + 100;
    spec.slot_capacity = static_cast<int32_t>(set_tokens + 40);
    spec.resident = row.kind != HeadKind::kEvictable;
    auto head = std::make_unique<Head>(shape_, spec);
    std::mt19937_64 generator(seed);
    const auto fill = [&](std::byte* rows, int64_t index) {
      const std::vector<uint16_t> bits =
          to_bits(shape_.type, random_floats(2 * shape_.head_dim, generator()));
      std::memcpy(rows + index * shape_.row_bytes(), bits.data(), bits.size() * 2);
    };
    const auto fill_stored = [&](std::byte* rows, int64_t index) {
      if (!shape_.compressed()) return fill(rows, index);
      // Of different sizes, so that a row's scale matters.
      const float size = index % 3 == 0 ? 0.25f : 1.0f;
      const std::vector<float> values = from_bits(
          shape_.type, to_bits(shape_.type, random_floats(2 * shape_.head_dim, generator(), size)));
      compress_row(shape_, values.data(), values.data() + shape_.head_dim,
                   rows + index * shape_.stored_row_bytes());
    };
    HeadCacheView& view = head->view;
    if (view.is_resident()) {
      for (int64_t t = 0; t < row.context; ++t) fill_stored(view.resident, t);
    }
    if (view.sink != nullptr) {
      for (int64_t t = 0; t < std::min<int64_t>(kSink, row.context); ++t) fill(view.sink, t);
      for (int64_t t = std::max<int64_t>(kSink, row.context - kRing); t < row.context; ++t) {
        fill(view.ring, t % kRing);
      }
    }
    const int64_t candidates = std::max<int64_t>(row.context - kRecent, kSink) - kSink;
    const auto used = static_cast<int32_t>(std::min(set_tokens, candidates));
    std::vector<int32_t> tokens(static_cast<size_t>(candidates));
    std::iota(tokens.begin(), tokens.end(), kSink);
    std::shuffle(tokens.begin(), tokens.end(), generator);
    view.state->num_slots_used = used;
    for (int32_t s = 0; s < used; ++s) {
      // Holes here and there, and whole tiles of them.
      const bool hole = s % 7 == 3 || (s >= 60 && s < 140);
      view.slot_token[s] = hole ? -1 : tokens[static_cast<size_t>(s)];
      if (!hole && !view.is_resident()) fill_stored(view.slots, s);
    }
    // Past the used ones the map says nothing.
    for (int32_t s = used; s < spec.slot_capacity; ++s) view.slot_token[s] = 1;
    view.state->num_set_tokens = used;
    head->upload();
    return head;
  }
};

inline void compare(const Step& step, const Step::Expected& expected,
                    const std::vector<uint16_t>& out_bits, const std::vector<float>& lse) {
  const std::vector<float> out = from_bits(step.shape_.type, out_bits);
  const int64_t dim = step.shape_.head_dim;
  for (size_t q = 0; q < lse.size(); ++q) {
    double dot = 0, a2 = 0, b2 = 0, largest = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const size_t at = q * static_cast<size_t>(dim) + static_cast<size_t>(d);
      const double a = out[at], b = expected.out[at];
      dot += a * b, a2 += a * a, b2 += b * b;
      largest = std::max(largest, std::abs(b));
      // Values are standard normal: 1e-2 of the largest of them is 0.03 and more.
      ASSERT_NEAR(a, b, 1e-2 * std::max(1.0, std::abs(b)))
          << "query head " << q << " element " << d;
    }
    if (std::isinf(expected.lse[q])) {
      ASSERT_EQ(a2, 0) << "query head " << q;
      ASSERT_EQ(lse[q], -INFINITY);
      continue;
    }
    ASSERT_GT(dot / std::sqrt(a2 * b2), 1 - 1e-5) << "query head " << q;
    ASSERT_NEAR(lse[q], expected.lse[q], 1e-3) << "query head " << q;
  }
}

}  // namespace attend_step
}  // namespace clo::kernels
