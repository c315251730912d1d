// Token rows on their way to every place that keeps them, against the CPU backend. Without QK-norm
// everything is equal bit for bit; with it the norm's sum runs in another order, and a rounded
// element may be one step of its type away. A code always is that of the key that was stored.
#include "kernels/rows/rows.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/gpu_test.h"
#include "kernels/rows_places.h"
#include "ops/stored_row.h"
#include "reference/cpu_ops.h"
#include "select/hash_signs.h"
#include "select/set_rule.h"

namespace clo::kernels {
namespace {

// QK-norm and rotation as the CPU does them, of the first num_heads heads from `x` on.
void rotate_on_cpu(CpuOps& ops, const Case& c, float* x, int num_heads, int64_t rows,
                   int64_t stride, const std::vector<float>& norm, const std::vector<float>& cosine,
                   const std::vector<float>& sine) {
  RotateParams p;
  p.x = x;
  p.cosine = cosine.data();
  p.sine = sine.data();
  p.norm_weight = c.norm ? norm.data() : nullptr;
  p.norm_epsilon = 1e-6f;
  p.num_rows = rows;
  p.stride = stride;
  p.num_heads = num_heads;
  p.head_dim = c.head_dim;
  ops.rotate(p);
}

// A row's angles: any cosine and sine will do.
struct Angles {
  Angles(int64_t rows, int head_dim) {
    for (const float angle : random_floats(rows * head_dim / 2, 5, 3)) {
      cosine.push_back(std::cos(angle));
      sine.push_back(std::sin(angle));
    }
  }
  std::vector<float> cosine, sine;
};

// parts [splits][rows][width] summed in order, then the bias.
std::vector<float> sum_parts(const std::vector<float>& parts, const std::vector<float>* bias,
                             int splits, size_t count) {
  std::vector<float> x(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(count));
  for (size_t s = 1; s < static_cast<size_t>(splits); ++s) {
    for (size_t i = 0; i < count; ++i) x[i] += parts[s * count + i];
  }
  if (bias == nullptr) return x;
  for (size_t i = 0; i < count; ++i) x[i] += (*bias)[i % bias->size()];
  return x;
}

void expect_queries(std::span<const float> got, std::span<const float> want, bool norm) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (norm) {
      ASSERT_NEAR(got[i], want[i], 1e-5f * std::max(1.0f, std::abs(want[i]))) << "element " << i;
    } else {
      ASSERT_EQ(got[i], want[i]) << "element " << i;
    }
  }
}

class RowsTest : public GpuTest {};

void run_chunk(const Case& c, int64_t first, int64_t rows);

void run_decode(const Case& c) {
  SCOPED_TRACE(testing::Message() << c);
  const std::vector<int64_t> positions = {0, 1, 255, 256, 257, 30, 511};
  constexpr size_t kInactive = 3;  // in the middle; the last row has no slot
  const auto rows = static_cast<int32_t>(std::ssize(positions)) + 1;
  CpuOps ops(2);
  Places places(c, 14);
  const KvShape& shape = places.shape_;
  std::vector<BatchSlot> slots(positions.size());
  std::vector<HeadCacheView> views(positions.size() * kLayers * static_cast<size_t>(c.kv_heads));
  std::vector<int32_t> row_slot;
  for (size_t r = 0; r < positions.size(); ++r) {
    const size_t at = positions.size() - 1 - r;
    Places::Sequence& s = places.add(positions[r] + 1);
    BatchSlot& slot = slots[at];
    slot.num_tokens = positions[r];
    slot.capacity_tokens = positions[r] + 1;
    slot.active = r != kInactive;
    slot.pages = s.device_pages->data();
    slot.code_blocks = s.device_blocks->data();
    std::copy(s.device_views.begin(), s.device_views.end(),
              views.begin() + static_cast<std::ptrdiff_t>((at * kLayers + kLayer) *
                                                          static_cast<size_t>(c.kv_heads)));
    row_slot.push_back(static_cast<int32_t>(at));
  }
  row_slot.push_back(-1);

  const int heads = shape.num_q_heads + 2 * shape.num_kv_heads;
  const int64_t width = int64_t{heads} * c.head_dim;
  const std::vector<float> parts = random_floats(c.splits * rows * width, 11);
  const std::vector<float> bias = random_floats(width, 12);
  const std::vector<float> q_norm = random_floats(c.head_dim, 13),
                           k_norm = random_floats(c.head_dim, 14);
  const Angles angles(rows, c.head_dim);

  std::vector<float> x =
      sum_parts(parts, c.bias ? &bias : nullptr, c.splits, static_cast<size_t>(rows * width));
  const int64_t q_width = int64_t{shape.num_q_heads} * c.head_dim;
  const int64_t kv_width = int64_t{shape.num_kv_heads} * c.head_dim;
  rotate_on_cpu(ops, c, x.data(), shape.num_q_heads, rows, width, q_norm, angles.cosine,
                angles.sine);
  rotate_on_cpu(ops, c, x.data() + q_width, shape.num_kv_heads, rows, width, k_norm, angles.cosine,
                angles.sine);
  for (size_t r = 0; r < positions.size(); ++r) {
    if (r == kInactive) continue;
    const float* row = x.data() + static_cast<int64_t>(r) * width;
    places.expect_append(ops, *places.sequences[r], positions[r], 1, row + q_width,
                         row + q_width + kv_width, width);
  }

  const DeviceArray<BatchSlot> device_slots(slots);
  const DeviceArray<HeadCacheView> device_views(views);
  const DeviceArray<int32_t> device_row_slot(row_slot);
  const DeviceArray<float> device_parts(parts), device_bias(bias), device_q_norm(q_norm),
      device_k_norm(k_norm), device_cosine(angles.cosine), device_sine(angles.sine);
  const DeviceArray<float> queries(rows * q_width);
  const std::vector<float> untouched = queries.download();
  // No head has a set yet, so each that needs one asks for it.
  const auto cells = std::ssize(views);
  const auto kv_heads = static_cast<size_t>(c.kv_heads);
  const DeviceArray<HeadRule> rules(std::vector<HeadRule>(views.size()));
  const DeviceArray<uint32_t> pending(std::vector<uint32_t>(views.size(), 0));
  const DeviceArray<uint32_t> decided(std::vector<uint32_t>(views.size(), kDueAhead));
  const DeviceArray<DeviceCounters> counters(
      std::vector<DeviceCounters>(positions.size() * kLayers));
  const DeviceArray<float> kept(2 * cells * c.group * c.head_dim);
  const DeviceArray<RefreshQueue> queue(std::vector<RefreshQueue>(1));
  constexpr uint32_t kJobs = 256;
  const DeviceArray<RefreshJob> jobs(std::vector<RefreshJob>(kNumRings * kJobs));
  DecodeRows p;
  p.tables.shape = shape;
  p.tables.rules = rules.data();
  p.tables.pending = pending.data();
  p.tables.decided = decided.data();
  p.tables.counters = counters.data();
  p.tables.kept_queries = kept.data();
  p.tables.queue = queue.data();
  p.tables.jobs = jobs.data();
  p.tables.queue_capacity = kJobs;
  p.tables.slots = device_slots.data();
  p.tables.row_slot = device_row_slot.data();
  p.tables.heads = device_views.data();
  p.tables.hashes = places.hashes->data();
  p.tables.host_rows = places.host_rows.data();
  p.tables.host_codes = reinterpret_cast<uint64_t*>(places.host_codes.data());
  p.tables.host = places.layout_;
  p.parts = device_parts.data();
  p.bias = c.bias ? device_bias.data() : nullptr;
  p.q_norm = c.norm ? device_q_norm.data() : nullptr;
  p.k_norm = c.norm ? device_k_norm.data() : nullptr;
  p.cosine = device_cosine.data();
  p.sine = device_sine.data();
  p.queries = queries.data();
  p.norm_epsilon = 1e-6f;
  p.layer = kLayer;
  p.rows = rows;
  p.splits = c.splits;
  decode_rows(p, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());

  const std::vector<float> got = queries.download();
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
    const auto of_row =
        std::span(got).subspan(r * static_cast<size_t>(q_width), static_cast<size_t>(q_width));
    if (r == kInactive || r >= positions.size()) {
      ASSERT_EQ(std::memcmp(of_row.data(), untouched.data(), of_row.size_bytes()), 0);
    } else {
      expect_queries(of_row,
                     std::span<const float>(x).subspan(r * static_cast<size_t>(width),
                                                       static_cast<size_t>(q_width)),
                     c.norm);
    }
  }
  places.check_rows(c.norm ? 1 : 0);
  places.check_codes(true, true);

  // Jobs of the heads that choose, with their queries.
  const std::vector<uint32_t> asked = pending.download(), flags = decided.download();
  const std::vector<float> kept_now = kept.download();
  const auto width_of_head = static_cast<size_t>(c.group * c.head_dim);
  uint64_t expected_jobs = 0;
  for (size_t r = 0; r < positions.size(); ++r) {
    const size_t slot = positions.size() - 1 - r;
    for (size_t h = 0; h < kv_heads; ++h) {
      const size_t cell = (slot * kLayers + kLayer) * kv_heads + h;
      const int64_t context = positions[r] + 1;
      const bool chooses = r != kInactive && (h % 2 == 0 || !covers(PolicyOptions{}, context));
      ASSERT_EQ(asked[cell], chooses ? 1u : 0u) << "row " << r << " head " << h;
      ASSERT_EQ(flags[cell], r == kInactive ? kDueAhead : chooses ? kChosenNow : 0u);
      if (!chooses) continue;
      ++expected_jobs;
      const size_t at = (cell * 2 + static_cast<size_t>(context & 1)) * width_of_head;
      const size_t of_row = r * static_cast<size_t>(q_width) + h * width_of_head;
      ASSERT_EQ(std::memcmp(kept_now.data() + at, got.data() + of_row, width_of_head * 4), 0);
    }
  }
  ASSERT_EQ(queue.download()[0].rings[kUrgent].tail, expected_jobs);
  ASSERT_EQ(queue.download()[0].rings[kAhead].tail, 0u);
}

TEST_F(RowsTest, DecodeRowsEqualTheCpus) {
  int splits = 0;
  for (const int head_dim : {64, 128}) {
    for (const int group : {1, 2, 3, 4, 5, 7, 8}) {
      for (const int kv_heads : {1, 2, 3, 8}) {
        const bool norm = (group + kv_heads) % 2 == 0, bias = kv_heads % 2 == 1;
        const DType type = kElementTypes[splits / 2 % 2];
        run_decode({head_dim, group, kv_heads, norm, bias, splits++ % 4 + 1, 128, false, type});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RowsTest, DecodeRowsMakeCodesOfEveryKind) {
  for (const int head_dim : {64, 128}) {
    for (const int bits : {64, 128, 256}) {
      for (const bool trained : {false, true}) {
        run_decode(
            {head_dim, 4, 2, true, true, 3, bits, trained, trained ? DType::kF16 : DType::kBF16});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Stored rows compressed, byte for byte; without a norm, whose last bit is the kernel's own.
TEST_F(RowsTest, CompressedRowsEqualTheCpus) {
  for (const RowFormat stored : {RowFormat::kInt8, RowFormat::kFp8}) {
    for (const int head_dim : {64, 128}) {
      for (const DType type : kElementTypes) {
        run_decode({head_dim, 4, 3, false, true, 2, 128, false, type, stored});
        if (HasFatalFailure()) return;
        for (const auto& [first, rows] :
             {std::pair<int64_t, int64_t>{0, 300}, {255, 258}, {3, 1}}) {
          run_chunk({head_dim, 3, 3, false, false, 1, 128, false, type, stored}, first, rows);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(RowsTest, PredictedQueriesEqualTheCpus) {
  for (const int head_dim : {64, 128}) {
    for (const int variant : {0, 1, 2, 3}) {
      const Case c{head_dim, 3, 2, variant % 2 == 1, variant / 2 == 1, variant + 1};
      SCOPED_TRACE(testing::Message() << c);
      CpuOps ops(2);
      const int64_t rows = 5, width = int64_t{c.group} * c.kv_heads * head_dim;
      const std::vector<float> parts = random_floats(c.splits * rows * width, 21);
      const std::vector<float> bias = random_floats(width, 22), norm = random_floats(head_dim, 23);
      const Angles angles(rows, head_dim);
      std::vector<float> x =
          sum_parts(parts, c.bias ? &bias : nullptr, c.splits, static_cast<size_t>(rows * width));
      rotate_on_cpu(ops, c, x.data(), c.group * c.kv_heads, rows, width, norm, angles.cosine,
                    angles.sine);
      const DeviceArray<float> device_parts(parts), device_bias(bias), device_norm(norm),
          cosine(angles.cosine), sine(angles.sine), queries(rows * width);
      PredictedQueries p;
      p.shape = {1, c.group * c.kv_heads, c.kv_heads, head_dim, DType::kBF16, 0};
      p.parts = device_parts.data();
      p.bias = c.bias ? device_bias.data() : nullptr;
      p.q_norm = c.norm ? device_norm.data() : nullptr;
      p.cosine = cosine.data();
      p.sine = sine.data();
      p.queries = queries.data();
      p.norm_epsilon = 1e-6f;
      p.rows = static_cast<int32_t>(rows);
      p.splits = c.splits;
      predicted_queries(p, nullptr);
      CLO_CUDA(cudaDeviceSynchronize());
      expect_queries(queries.download(), x, c.norm);
      if (HasFatalFailure()) return;
    }
  }
}

void run_chunk(const Case& c, int64_t first, int64_t rows) {
  SCOPED_TRACE(testing::Message() << c << " tokens " << first << " + " << rows);
  CpuOps ops(2);
  const int64_t capacity = first + rows + 3;
  Places places(c, capacity / kPageTokens + 2);
  const KvShape& shape = places.shape_;
  Places::Sequence& s = places.add(capacity);
  const int64_t q_width = int64_t{shape.num_q_heads} * c.head_dim;
  const int64_t kv_width = int64_t{shape.num_kv_heads} * c.head_dim;
  const int64_t width = q_width + 2 * kv_width;
  const std::vector<uint16_t> qkv = to_bits(c.type, random_floats(rows * width, 31));
  const std::vector<float> q_norm = random_floats(c.head_dim, 33),
                           k_norm = random_floats(c.head_dim, 34);
  const Angles angles(rows, c.head_dim);
  std::vector<float> x = from_bits(c.type, qkv);
  rotate_on_cpu(ops, c, x.data(), shape.num_q_heads, rows, width, q_norm, angles.cosine,
                angles.sine);
  rotate_on_cpu(ops, c, x.data() + q_width, shape.num_kv_heads, rows, width, k_norm, angles.cosine,
                angles.sine);
  places.expect_append(ops, s, first, rows, x.data() + q_width, x.data() + q_width + kv_width,
                       width);

  const DeviceArray<uint16_t> device_qkv(qkv);
  const DeviceArray<float> device_q_norm(q_norm), device_k_norm(k_norm), cosine(angles.cosine),
      sine(angles.sine), last_query(q_width);
  const DeviceArray<uint16_t> queries(rows * q_width);
  const DeviceArray<std::byte> buffer(shape.num_kv_heads * capacity * shape.row_bytes());
  ChunkRows p;
  p.shape = shape;
  p.qkv = device_qkv.data();
  p.q_norm = c.norm ? device_q_norm.data() : nullptr;
  p.k_norm = c.norm ? device_k_norm.data() : nullptr;
  p.cosine = cosine.data();
  p.sine = sine.data();
  p.queries = queries.data();
  p.last_query = last_query.data();
  p.layer_rows = buffer.data();
  p.layer_capacity = capacity;
  p.hashes = places.hashes->data() + kLayer * shape.num_kv_heads;
  p.code_blocks = s.device_blocks->data();
  p.norm_epsilon = 1e-6f;
  p.layer = kLayer;
  p.first_token = first;
  p.rows = rows;
  chunk_rows(p, nullptr);

  const DeviceArray<HeadCacheView> heads(s.device_views);
  StoreChunk store;
  store.shape = shape;
  store.heads = heads.data();
  store.layer_rows = buffer.data();
  store.layer_capacity = capacity;
  store.first_token = first;
  store.rows = rows;
  store.end_token = first + rows;
  store_chunk(store, nullptr);

  MovePages move;
  move.layout = places.layout_;
  move.host_rows = places.host_rows.data();
  move.host_codes = reinterpret_cast<uint64_t*>(places.host_codes.data());
  move.pages = s.device_pages->data();
  move.code_blocks = s.device_blocks->data();
  move.layer_rows = buffer.data();
  move.layer_capacity = capacity;
  move.first_token = first;
  move.end_token = first + rows;
  move.layer = kLayer;
  move.num_blocks = 3;
  move_pages(move, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());

  const int steps = c.norm ? 1 : 0;
  places.check_rows(steps);
  if (testing::Test::HasFatalFailure()) return;
  places.check_codes(true, true);
  if (testing::Test::HasFatalFailure()) return;
  const std::vector<uint16_t> got = queries.download();
  std::vector<uint16_t> want;
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = std::span<const float>(x).subspan(static_cast<size_t>(r * width),
                                                       static_cast<size_t>(q_width));
    const std::vector<uint16_t> rounded = to_bits(c.type, row);
    want.insert(want.end(), rounded.begin(), rounded.end());
    if (r == rows - 1) expect_queries(last_query.download(), row, c.norm);
  }
  expect_rows(std::as_bytes(std::span(got)), std::as_bytes(std::span(want)), steps, "queries",
              c.type);
  if (testing::Test::HasFatalFailure()) return;

  // And back: the same rows, nothing else touched.
  const DeviceArray<std::byte> other(buffer.size());
  std::vector<std::byte> expected(static_cast<size_t>(buffer.size()), std::byte{0xCB});
  const std::vector<std::byte> moved = buffer.download();
  for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
    const auto at = static_cast<std::ptrdiff_t>((h * capacity + first) * shape.row_bytes());
    std::copy_n(moved.begin() + at, rows * shape.row_bytes(), expected.begin() + at);
    if (!shape.compressed()) continue;
    // What comes back is what the store has.
    for (int64_t t = first; t < first + rows; ++t) {
      const int64_t stored =
          places.layout_.row_offset(kLayer, s.pages[static_cast<size_t>(t / kPageTokens)],
                                    static_cast<int32_t>(h), static_cast<int32_t>(t % kPageTokens));
      expand_to_full(shape, places.host_rows.data() + stored,
                     expected.data() + (h * capacity + t) * shape.row_bytes());
    }
  }
  move.layer_rows = other.data();
  move.code_blocks = nullptr;
  move.to_host = false;
  move_pages(move, nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  ASSERT_TRUE(other.download() == expected);
}

TEST_F(RowsTest, ChunksGoEverywhereAsOnTheCpu) {
  int variant = 0;
  for (const int head_dim : {64, 128}) {
    for (const int group : {1, 3, 4, 8}) {
      for (const int kv_heads : {1, 2, 3, 8}) {
        for (const auto& [first, rows] :
             {std::pair<int64_t, int64_t>{0, 1}, {0, 300}, {250, 7}, {255, 258}, {3, 24}}) {
          const Case c{head_dim,
                       group,
                       kv_heads,
                       variant % 2 == 1,
                       false,
                       1,
                       variant % 3 == 0 ? 64 : 128,
                       false,
                       kElementTypes[variant / 2 % 2]};
          ++variant;
          run_chunk(c, first, rows);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace clo::kernels
