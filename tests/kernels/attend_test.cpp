// Decode attention against the CPU backend, over tables with every kind of head, and the arithmetic
// that deals its tiles.
#include "kernels/attend/attend.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <numeric>

#include "kernels/attend/deal.h"
#include "kernels/gpu_test.h"
#include "kv/head_cache.h"
#include "ops/stored_row.h"
#include "reference/cpu_ops.h"

namespace clo::kernels {
namespace {

TEST(AttendDeal, RunsCoverEveryTileOnceAndPartsAreConsecutive) {
  for (const int32_t total : {1, 2, 7, 131, 132, 133, 263, 264, 265, 1000, 6554, 268435456}) {
    for (const int32_t grid : {1, 2, 7, 264, 1024}) {
      const int32_t blocks = dealing_blocks(total, grid);
      ASSERT_GE(blocks, 1);
      ASSERT_EQ(first_tile(total, 0, blocks), 0);
      ASSERT_EQ(first_tile(total, blocks, blocks), total);
      for (int32_t b = 0; b < blocks; ++b) {
        const int32_t first = first_tile(total, b, blocks), end = first_tile(total, b + 1, blocks);
        ASSERT_GT(end, first);
        ASSERT_LE(end - first, total / blocks + 1);
        ASSERT_EQ(block_of_tile(total, first, blocks), b);
        ASSERT_EQ(block_of_tile(total, end - 1, blocks), b);
      }
    }
  }
}

TEST(AttendDeal, SegmentNumbersAreUniqueAndInsideTheScratch) {
  const std::vector<int32_t> tiles = {3, 0, 1, 1, 50, 0, 0, 7, 2, 900, 1};
  const int32_t total = std::accumulate(tiles.begin(), tiles.end(), 0);
  for (const int32_t grid : {1, 2, 7, 264, 1024}) {
    const int32_t blocks = dealing_blocks(total, grid);
    std::vector<int> taken(
        static_cast<size_t>(attend_parts(grid, static_cast<int32_t>(std::ssize(tiles)), 1)));
    int32_t first = 0;
    for (int32_t head = 0; head < std::ssize(tiles); ++head) {
      const int32_t end = first + tiles[static_cast<size_t>(head)];
      if (end == first) continue;
      for (int32_t b = block_of_tile(total, first, blocks);
           b <= block_of_tile(total, end - 1, blocks); ++b) {
        ASSERT_EQ(taken.at(static_cast<size_t>(b + head))++, 0);
      }
      first = end;
    }
  }
}

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
    std::vector<int64_t> rows_read;  // [rows, KV heads]
  };
  // The CPU's answer; rows without a sequence are zero.
  Expected expect() {
    Expected e;
    e.out.assign(queries_host_.size(), 0.0f);
    e.lse.assign(static_cast<size_t>(num_rows_ * shape_.num_q_heads), -INFINITY);
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

void compare(const Step& step, const Step::Expected& expected,
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

class AttendTest : public GpuTest {};

TEST_F(AttendTest, EqualsTheCpuForEveryShapeAndGrid) {
  const std::vector<int64_t> contexts = {1, 3, 5, 64, 130, 255, 256, 257, 1000, 20000};
  for (const int head_dim : {64, 128}) {
    for (const int group : {1, 2, 3, 4, 5, 7, 8}) {
      for (const int kv_heads : {1, 2, 3, 8}) {
        SCOPED_TRACE(testing::Message()
                     << "head_dim " << head_dim << " group " << group << " kv heads " << kv_heads);
        const DType type = kElementTypes[(group + kv_heads + head_dim / 64) % 2];
        std::vector<Step::Row> rows;
        for (size_t i = 0; i < contexts.size(); ++i) {
          // 20000 tokens for the largest shapes only once each, to keep the test short.
          const int64_t context =
              contexts[i] == 20000 && kv_heads == 8 && group != 4 ? 3000 : contexts[i];
          rows.push_back({context, static_cast<HeadKind>((i + static_cast<size_t>(group)) % 3)});
          if (i == 4) rows.push_back({.context = 50, .active = false});
        }
        rows.push_back({.context = 70, .active = false});
        Step step(head_dim, group, kv_heads, rows, type);
        const Step::Expected expected = step.expect();
        const int64_t read =
            std::accumulate(expected.rows_read.begin(), expected.rows_read.end(), int64_t{0});
        int64_t runs = 0;
        for (const int32_t grid : {1, 2, 7, 264}) {
          SCOPED_TRACE(testing::Message() << "grid " << grid);
          step.run(grid), ++runs;
          const auto out = step.out_->download();
          const auto lse = step.lse_->download();
          compare(step, expected, out, lse);
          if (HasFatalFailure()) return;
          step.run(grid), ++runs;
          ASSERT_EQ(step.out_->download(), out) << "a second run differs";
          const auto again = step.lse_->download();
          ASSERT_EQ(std::memcmp(again.data(), lse.data(), lse.size() * sizeof(float)), 0);
          for (const uint32_t count : step.arrivals_->download()) ASSERT_EQ(count, 0u);
        }
        unsigned long long attended = 0, in_context = 0, context = 0;
        for (const DeviceCounters& c : step.counters_->download()) {
          attended += c.rows_attended, in_context += c.rows_in_context;
        }
        for (const Step::Row& row : rows) {
          if (row.active) context += static_cast<unsigned long long>(row.context * kv_heads);
        }
        ASSERT_EQ(attended, static_cast<unsigned long long>(read * runs));
        ASSERT_EQ(in_context, context * static_cast<unsigned long long>(runs));
        ASSERT_EQ(step.queue_->download()[0].fault, 0u);
      }
    }
  }
}

// Rows of two forms in one list: sinks and ring full, the rest compressed.
TEST_F(AttendTest, CompressedRowsGiveTheCpusResult) {
  for (const RowFormat stored : {RowFormat::kInt8, RowFormat::kFp8}) {
    for (const int head_dim : {64, 128}) {
      for (const int group : {1, 4, 7, 8}) {
        for (const DType type : kElementTypes) {
          SCOPED_TRACE(testing::Message()
                       << "head_dim " << head_dim << " group " << group << " " << dtype_name(type)
                       << " format " << static_cast<int>(stored));
          std::vector<Step::Row> rows;
          for (const int64_t context : {1, 3, 5, 40, 64, 257, 3000}) {
            for (const HeadKind kind :
                 {HeadKind::kEvictable, HeadKind::kResidentSet, HeadKind::kResidentAll}) {
              rows.push_back({context, kind});
            }
          }
          rows.push_back({.context = 50, .active = false});
          Step step(head_dim, group, 2, rows, type, stored);
          const Step::Expected expected = step.expect();
          unsigned long long full = 0;
          for (const int32_t grid : {7, 264}) {
            step.run(grid);
            compare(step, expected, step.out_->download(), step.lse_->download());
            if (HasFatalFailure()) return;
          }
          for (const Step::Row& row : rows) {
            const HeadCacheView& head = step.head(0, 0).view;
            const int64_t fixed = head.sink_tokens + head.ring_tokens;
            if (row.active) full += static_cast<unsigned long long>(std::min(row.context, fixed));
          }
          unsigned long long counted = 0;
          for (const DeviceCounters& c : step.counters_->download()) {
            counted += c.full_rows_attended;
          }
          ASSERT_EQ(counted, full * 2 * 2);  // KV heads, runs
          ASSERT_EQ(step.queue_->download()[0].fault, 0u);
        }
      }
    }
  }
}

// The largest values that int8 rows of an f16 model can have: weight times scale stays a number.
TEST_F(AttendTest, LargestValuesOfCompressedF16Rows) {
  const std::vector<Step::Row> rows = {{.context = 3000},
                                       {.context = 3000, .kind = HeadKind::kResidentAll}};
  Step step(128, 4, 2, rows, DType::kF16, RowFormat::kInt8);
  const float scale = 65504.0f / 127;
  for (int32_t i = 0; i < 2 * 2; ++i) {
    Head& head = step.head(i / 2, i % 2);
    std::byte* const stored = head.view.is_resident() ? head.view.resident : head.view.slots;
    const int64_t count = head.view.is_resident() ? 3000 : head.view.state->num_slots_used;
    for (int64_t row = 0; row < count; ++row) {
      std::memcpy(stored + row * step.shape_.stored_row_bytes() + step.shape_.scale_offset() + 4,
                  &scale, sizeof scale);
    }
    head.upload();
  }
  const Step::Expected expected = step.expect();
  step.run(264);
  const std::vector<float> out = from_bits(DType::kF16, step.out_->download());
  double dot = 0, a2 = 0, b2 = 0, largest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_TRUE(std::isfinite(out[i])) << i;
    const double a = out[i], b = expected.out[i];
    dot += a * b, a2 += a * a, b2 += b * b;
    largest = std::max(largest, std::abs(b));
  }
  EXPECT_GT(dot / std::sqrt(a2 * b2), 1 - 1e-5);
  EXPECT_GT(largest, 1000);  // what is compared is large
}

TEST_F(AttendTest, ManyHeadsWithManyInactive) {
  std::vector<Step::Row> rows;
  for (int i = 0; i < 512; ++i) rows.push_back({.context = 40 + i % 50, .active = i % 100 < 3});
  Step step(64, 2, 8, rows);
  const Step::Expected expected = step.expect();
  for (const int32_t grid : {7, 264}) {
    step.run(grid);
    compare(step, expected, step.out_->download(), step.lse_->download());
    if (HasFatalFailure()) return;
  }
}

TEST_F(AttendTest, NoActiveRowGivesZeros) {
  Step step(128, 4, 8, {{.context = 9, .active = false}, {.context = 9, .active = false}});
  step.run(264);
  compare(step, step.expect(), step.out_->download(), step.lse_->download());
}

TEST_F(AttendTest, ANotANumberStaysInItsHead) {
  for (const auto& [in_key, type] : {std::pair(true, DType::kBF16), std::pair(false, DType::kBF16),
                                     std::pair(true, DType::kF16), std::pair(false, DType::kF16)}) {
    Step step(128, 4, 2, {{.context = 600}, {.context = 600}, {.context = 600}}, type);
    Head& poisoned = step.head(1, 1);
    const uint16_t nan = type == DType::kBF16 ? 0x7FC0 : 0x7E00;
    const int64_t row_bytes = step.shape_.row_bytes();
    int32_t slot = 0;  // one that is attended: neither a hole nor in the ring
    while (poisoned.view.slot_token[slot] < 0 || poisoned.view.slot_token[slot] >= 570) ++slot;
    std::memcpy(poisoned.view.slots + slot * row_bytes + (in_key ? 0 : row_bytes / 2), &nan, 2);
    poisoned.upload();
    step.run(7);
    const std::vector<float> out = from_bits(type, step.out_->download());
    const std::vector<float> lse = step.lse_->download();
    for (size_t q = 0; q < lse.size(); ++q) {
      const bool of_poisoned = q / 4 == 1 * 2 + 1;
      EXPECT_EQ(std::isnan(lse[q]), of_poisoned && in_key);
      for (size_t d = 0; d < 128; ++d) {
        // A value's NaN is its own element's; a key's is everything's.
        EXPECT_EQ(std::isnan(out[q * 128 + d]), of_poisoned && (in_key || d == 0));
      }
    }
  }
}

TEST_F(AttendTest, WaitsForAPendingHead) {
  Step step(128, 4, 8, {{.context = 1000}, {.context = 700}});
  const Step::Expected expected = step.expect();
  // The set arrives while attention waits: until then the head has none.
  const int32_t slot = step.num_rows_ - 1, kv_head = 3;
  HeadState* state = step.head(0, kv_head).device_state();
  const HeadState full = *step.head(0, kv_head).view.state;
  HeadState empty = full;
  empty.num_slots_used = 0;
  CLO_CUDA(cudaMemcpy(state, &empty, sizeof empty, cudaMemcpyHostToDevice));
  uint32_t* flag = step.pending_->data() + step.index(slot, kv_head);
  const uint32_t one = 1, zero = 0;
  CLO_CUDA(cudaMemcpy(flag, &one, sizeof one, cudaMemcpyHostToDevice));
  cudaStream_t compute = nullptr, side = nullptr;
  CLO_CUDA(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
  CLO_CUDA(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  attend(step.params(132), compute);
  CLO_CUDA(cudaMemcpyAsync(state, &full, sizeof full, cudaMemcpyHostToDevice, side));
  CLO_CUDA(cudaStreamSynchronize(side));
  EXPECT_EQ(cudaStreamQuery(compute), cudaErrorNotReady);
  CLO_CUDA(cudaMemcpyAsync(flag, &zero, sizeof zero, cudaMemcpyHostToDevice, side));
  CLO_CUDA(cudaStreamSynchronize(side));
  CLO_CUDA(cudaStreamSynchronize(compute));
  compare(step, expected, step.out_->download(), step.lse_->download());
  unsigned long long waited = 0;
  for (const DeviceCounters& c : step.counters_->download()) waited += c.wait_ns;
  EXPECT_GT(waited, 0u);
  EXPECT_EQ(step.queue_->download()[0].fault, 0u);
  CLO_CUDA(cudaStreamDestroy(compute));
  CLO_CUDA(cudaStreamDestroy(side));
}

// Only of sequences that look a step ahead: in others the flag is of no one's making.
TEST_F(AttendTest, QueuesWhatIsDueForTheNextStep) {
  Step step(128, 4, 3,
            {{.context = 900, .predict = PredictRule::kPreviousStep},
             {.context = 901},
             {.context = 50, .active = false, .predict = PredictRule::kPreviousStep},
             {.context = 41, .predict = PredictRule::kPreviousStep}});
  const int32_t first = step.num_rows_ - 1, last = 0;  // slots of the first and the last row
  std::vector<uint32_t> due = step.decided_->download();
  for (int32_t slot = 0; slot < step.num_rows_; ++slot) due[step.index(slot, 1)] |= kDueAhead;
  due[step.index(first, 2)] |= kDueAhead;
  step.decided_->upload(due);
  step.run(132);
  compare(step, step.expect(), step.out_->download(), step.lse_->download());
  const RefreshQueue queue = step.queue_->download()[0];
  EXPECT_EQ(queue.rings[kUrgent].tail, 0u);
  ASSERT_EQ(queue.rings[kAhead].tail, 3u);
  std::vector<RefreshJob> jobs = step.jobs_->download();
  std::vector<RefreshJob> ahead(jobs.begin() + Step::kJobs, jobs.begin() + Step::kJobs + 3);
  std::sort(ahead.begin(), ahead.end(), [](const RefreshJob& a, const RefreshJob& b) {
    return std::pair(a.slot, a.kv_head) < std::pair(b.slot, b.kv_head);
  });
  const RefreshJob expected[] = {{last, Step::kLayer, 1, 1, 42, 0},
                                 {first, Step::kLayer, 1, 0, 901, 0},
                                 {first, Step::kLayer, 2, 0, 901, 0}};
  const std::vector<uint32_t> pending = step.pending_->download();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(ahead[i].slot, expected[i].slot);
    EXPECT_EQ(ahead[i].layer, expected[i].layer);
    EXPECT_EQ(ahead[i].kv_head, expected[i].kv_head);
    EXPECT_EQ(ahead[i].query, expected[i].query);
    EXPECT_EQ(ahead[i].context_tokens, expected[i].context_tokens);
    EXPECT_TRUE(ahead[i].ticket >= 1 && ahead[i].ticket <= 3);
    EXPECT_EQ(pending[step.index(expected[i].slot, expected[i].kv_head)], 1u);
  }
  EXPECT_EQ(std::accumulate(pending.begin(), pending.end(), 0u), 3u);
}

// The kernel that samples a head's mass queues its job, after the set has been looked at; where no
// such kernel runs (no log-sum-exp is kept for it) attention does.
TEST_F(AttendTest, LeavesTheJobsOfHeadsThatAreLookedAt) {
  for (const bool sampled : {true, false}) {
    Step step(128, 4, 3,
              {{.context = 900, .predict = PredictRule::kPreviousStep, .looks = MassLooks::kAll},
               {.context = 901, .predict = PredictRule::kPreviousStep}});
    std::vector<uint32_t> due = step.decided_->download();
    for (int32_t slot = 0; slot < step.num_rows_; ++slot) {
      for (int32_t h = 0; h < 3; ++h) due[step.index(slot, h)] |= kDueAhead;
    }
    step.decided_->upload(due);
    AttendRows params = step.params(132);
    if (!sampled) params.log_sum_exp = nullptr;
    attend(params, nullptr);
    CLO_CUDA(cudaDeviceSynchronize());
    const int32_t looked_at = step.num_rows_ - 1;  // the first row's slot
    EXPECT_EQ(step.queue_->download()[0].rings[kAhead].tail, sampled ? 3u : 6u);
    const std::vector<uint32_t> pending = step.pending_->download();
    for (int32_t h = 0; h < 3; ++h) {
      EXPECT_EQ(pending[step.index(looked_at, h)], sampled ? 0u : 1u);
      EXPECT_EQ(pending[step.index(0, h)], 1u);
    }
  }
}

}  // namespace
}  // namespace clo::kernels
