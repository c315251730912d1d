// Decode attention against the CPU backend, over tables with every kind of head, and the arithmetic
// that deals its tiles.
#include "kernels/attend/attend.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/attend/deal.h"
#include "kernels/attend_step.h"

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

// Of each head with a set, where the hit test asks for it.
TEST_F(AttendTest, NotesTheCpusEntropies) {
  for (const int group : {1, 3, 4, 8}) {
    for (const RowFormat stored : {RowFormat::kFull, RowFormat::kInt8}) {
      std::vector<Step::Row> rows;
      for (const int64_t context : {1, 5, 257, 3000}) {
        for (const HeadKind kind :
             {HeadKind::kEvictable, HeadKind::kResidentSet, HeadKind::kResidentAll}) {
          rows.push_back({.context = context, .kind = kind, .entropy_rise = 0.5f});
        }
      }
      rows.push_back({.context = 900});
      rows.push_back({.context = 50, .active = false, .entropy_rise = 0.5f});
      Step step(group == 3 ? 64 : 128, group, 3, rows, kElementTypes[group % 2], stored);
      const Step::Expected expected = step.expect();
      step.run(group == 1 ? 7 : 264);
      const std::vector<HeadEntropy> noted = step.entropies_->download();
      for (int32_t r = 0; r < step.num_rows_; ++r) {
        const Step::Row& row = rows[static_cast<size_t>(r)];
        const bool asked = row.active && row.entropy_rise > 0 && row.kind != HeadKind::kResidentAll;
        for (int32_t h = 0; h < 3; ++h) {
          const HeadEntropy& entropy = noted[step.index(step.num_rows_ - 1 - r, h)];
          for (int32_t g = 0; g < kMaxGroup; ++g) {
            SCOPED_TRACE(testing::Message() << "row " << r << " head " << h << " query " << g);
            if (!asked || g >= group) {
              ASSERT_TRUE(std::isnan(entropy.last[g]) && std::isnan(entropy.at_label[g]));
              continue;
            }
            const auto at = static_cast<size_t>((r * 3 + h) * group + g);
            ASSERT_NEAR(entropy.last[g], expected.min_entropy[at], 2e-3);
            ASSERT_EQ(entropy.at_label[g], entropy.last[g]);  // the first step with the set
          }
        }
      }
    }
  }
}

// A next step that was to keep its set is due for another where the entropy has risen too far since
// the set was new; what was counted as a hit is a miss then.
TEST_F(AttendTest, ARisenEntropyMakesTheNextSetDue) {
  constexpr float kRise = 0.25f;
  constexpr int32_t kHeads = 5;
  const auto resident = HeadKind::kResidentSet;
  Step step(128, 4, kHeads,
            {{.context = 900, .predict = PredictRule::kPreviousStep, .entropy_rise = kRise},
             {.context = 901,
              .kind = resident,
              .predict = PredictRule::kPreviousStep,
              .entropy_rise = kRise}});
  // Head 0 has risen; head 1 less far; head 2 has, but its set is new; head 3 has, but was due
  // already; of head 4 nothing is known.
  const Step::Expected expected = step.expect();
  std::vector<HeadEntropy> before = step.entropies_->download();
  std::vector<uint32_t> decided = step.decided_->download();
  for (int32_t r = 0; r < 2; ++r) {
    for (int32_t h = 0; h < kHeads; ++h) {
      const size_t cell = step.index(1 - r, h);
      step.head(r, h).view.state->label_length = h == 2 ? 900 + r : 880;
      step.head(r, h).upload();
      decided[cell] = h == 3 ? kDueAhead : kKeptAhead;
      for (int32_t g = 0; g < 4 && h < 4; ++g) {
        const float now = expected.min_entropy[static_cast<size_t>((r * kHeads + h) * 4 + g)];
        before[cell].at_label[g] = now - (h == 1 ? kRise - 0.02f : kRise + 0.02f);
      }
    }
  }
  std::vector<HeadRule> rules = step.rules_->download();
  for (HeadRule& rule : rules) std::fill_n(rule.weight, 4, 1.0);
  step.rules_->upload(rules);
  step.entropies_->upload(before);
  step.decided_->upload(decided);
  step.run(132);
  compare(step, expected, step.out_->download(), step.lse_->download());
  EXPECT_EQ(step.queue_->download()[0].rings[kAhead].tail, 4u);
  const std::vector<uint32_t> pending = step.pending_->download();
  const std::vector<HeadEntropy> noted = step.entropies_->download();
  for (int32_t r = 0; r < 2; ++r) {
    for (int32_t h = 0; h < kHeads; ++h) {
      const size_t cell = step.index(1 - r, h);
      EXPECT_EQ(pending[cell], h == 0 || h == 3 ? 1u : 0u) << r << " " << h;
      const bool first = h == 2 || h == 4;
      EXPECT_EQ(noted[cell].at_label[1], first ? noted[cell].last[1] : before[cell].at_label[1]);
    }
  }
  const std::vector<DeviceCounters> counted = step.counters_->download();
  const DeviceCounters& evictable = counted[1 * 2 + Step::kLayer];
  const int32_t kept = step.head(0, 0).view.state->num_set_tokens;
  EXPECT_EQ(evictable.misses, 1u);
  EXPECT_EQ(evictable.hits, 0ull - 1);
  EXPECT_EQ(evictable.rows_saved_by_hits, 0ull - static_cast<unsigned long long>(kept));
  EXPECT_EQ(counted[0 * 2 + Step::kLayer].resident_selections, 1u);
  EXPECT_EQ(counted[0 * 2 + Step::kLayer].misses, 0u);
}

}  // namespace
}  // namespace clo::kernels
