// Overlap of sets and modes of attention: by hand, on a head laid out in memory, and as an engine
// shows them.
#include "eval/set_watcher.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "clo/engine.h"
#include "eval/random.h"
#include "kv/head_cache.h"
#include "ops/token_mask.h"

namespace clo {
namespace {

TEST(Jaccard, IsSharedOverEither) {
  const std::vector<int32_t> a = {1, 4, 7, 9}, b = {4, 5, 9}, none;
  EXPECT_DOUBLE_EQ(jaccard(a, b), 2.0 / 5);
  EXPECT_DOUBLE_EQ(jaccard(b, a), 2.0 / 5);
  EXPECT_DOUBLE_EQ(jaccard(a, a), 1);
  EXPECT_DOUBLE_EQ(jaccard(a, none), 0);
  EXPECT_DOUBLE_EQ(jaccard(none, none), 1);
}

TEST(Modes, AreRunsOfHeavyBlocks) {
  const auto modes = [](const std::vector<TokenWeight>& tokens) { return count_modes(tokens); };
  EXPECT_EQ(modes({}), 0);
  EXPECT_EQ(modes({{5, 0.09}}), 0);
  EXPECT_EQ(modes({{5, 0.1}}), 1);
  EXPECT_EQ(modes({{0, 0.06}, {63, 0.06}}), 1);
  EXPECT_EQ(modes({{63, 0.06}, {64, 0.06}}), 0);  // blocks of 64: each too light
  EXPECT_EQ(modes({{0, 0.2}, {64, 0.2}, {128, 0.2}}), 1);
  EXPECT_EQ(modes({{0, 0.2}, {64, 0.05}, {128, 0.2}, {400, 0.3}}), 3);
  EXPECT_EQ(modes({{64, 0.2}, {300, 0.2}}), 2);
}

// One head with two queries. Scores are the elements of a token's key: element 0 for the first
// query, element 1 for the second.
class Head : public testing::Test {
 protected:
  static constexpr int kDim = 16;
  static constexpr int64_t kContext = 300;
  Head() : queries_(2 * kDim, 0.0f) {
    queries_[0] = queries_[kDim + 1] = 4;  // sqrt(kDim)
    for (auto& key : keys_) key = -60;     // weighs nothing
    keys_[0] = std::log(40.0f);            // a sink
    keys_[20] = keys_[30] = std::log(11.0f);
    keys_[150] = std::log(12.0f);
    keys_[299] = std::log(26.0f);  // recent
  }
  void lay_out(bool resident, RowFormat stored = RowFormat::kFull) {
    shape_ = {1, 2, 1, kDim, DType::kF32, 0, stored};
    HeadCacheSpec spec{2, 4, 10, 320, resident};
    block_.assign(static_cast<size_t>(head_cache_bytes(shape_, spec) + 64), std::byte{0});
    auto* begin =
        reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(block_.data()) + 63) / 64 * 64);
    head_ = bind_head_cache(shape_, spec, begin);
    for (int64_t t = 0; t < kContext; ++t) {
      if (resident) write(head_.resident + t * shape_.stored_row_bytes(), t);
      if (resident && !shape_.compressed()) continue;
      if (t < 2) write(head_.sink + t * shape_.row_bytes(), t);
      if (t >= kContext - 4) write(head_.ring + t % 4 * shape_.row_bytes(), t);
    }
  }
  void write(std::byte* row, int64_t token) const {
    float key[kDim] = {keys_[static_cast<size_t>(token)], 0};
    std::memcpy(row, key, sizeof key);
  }
  void choose(const std::vector<int32_t>& slots) {
    head_.state->num_slots_used = static_cast<int32_t>(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      head_.slot_token[i] = slots[i];
      if (slots[i] >= 0 && !head_.is_resident()) {
        write(head_.slots + static_cast<int64_t>(i) * shape_.stored_row_bytes(), slots[i]);
      }
    }
  }
  void step(bool attend_all) {
    HeadTask task;
    task.head = &head_;
    task.sequence = &view_;
    task.query = queries_.data();
    task.context_tokens = kContext;
    task.attend_all = attend_all;
    watcher_.on_decode(shape_, 0, {&task, 1});
  }

  std::vector<float> queries_;
  float keys_[kContext];
  KvShape shape_;
  std::vector<std::byte> block_;
  HeadCacheView head_;
  SequenceLayerView view_;
  SetWatcher watcher_;
};

TEST_F(Head, DenseAttentionHasModesAndNoSets) {
  lay_out(true);
  step(true);
  step(true);
  // Weights 40, 11 and 11 in the first block, 12 in the third, 26 in the fifth: three modes. The
  // second query's weight is the same everywhere: one.
  const SetFigures figures = watcher_.take();
  EXPECT_EQ(figures.overlaps, 0);
  EXPECT_EQ(figures.modes, 4);
  EXPECT_EQ(figures.modes_sum, 8);
  EXPECT_EQ(figures.mean_modes(), 2);
  EXPECT_EQ(watcher_.take().modes, 0);
}

TEST_F(Head, MaskedTokensAreNoMode) {
  lay_out(true);
  const TokenMask mask(std::vector<TokenRange>{{140, 160}});
  view_.mask = &mask;
  step(true);
  EXPECT_EQ(watcher_.take().modes_sum, 2 + 1);
}

TEST_F(Head, SetsAreComparedWithTheStepBefore) {
  for (const bool resident : {false, true}) {
    lay_out(resident);
    choose(resident ? std::vector<int32_t>{20, 150} : std::vector<int32_t>{150, -1, 20});
    step(false);
    // First query: 40, 11, 12, 26 of 89. Second: eight rows with an eighth each, two of them
    // chosen.
    SetFigures figures = watcher_.take();
    EXPECT_EQ(figures.overlaps, 0);
    EXPECT_EQ(figures.modes, 2);
    EXPECT_EQ(figures.modes_sum, 6);
    choose(resident ? std::vector<int32_t>{30, 150} : std::vector<int32_t>{150, 30});
    step(false);
    step(false);
    figures = watcher_.take();
    EXPECT_EQ(figures.overlaps, 2);
    EXPECT_DOUBLE_EQ(figures.overlap_sum, 1.0 / 3 + 1);
    watcher_.begin();  // another request: nothing to compare with
    step(false);
    EXPECT_EQ(watcher_.take().overlaps, 0);
    watcher_.begin();
  }
}

// Sinks and recent rows are full, the others compressed: a score of 6 in the first and last block
// from full rows, one in the third from codes, nothing elsewhere.
TEST_F(Head, RowsAreReadInTheirForm) {
  for (auto& key : keys_) key = 0;
  keys_[0] = keys_[299] = 6;
  lay_out(true, RowFormat::kInt8);
  std::memset(head_.resident, 0, static_cast<size_t>(kContext * shape_.stored_row_bytes()));
  std::byte* row = head_.resident + 150 * shape_.stored_row_bytes();
  const float scale = 6.0f / 127;
  row[0] = std::byte{127};
  std::memcpy(row + shape_.scale_offset(), &scale, sizeof scale);
  step(true);
  // Three times e^6 = 403 of 1507; a block of others has 64.
  EXPECT_EQ(watcher_.take().modes_sum, 3 + 1);
}

class Watched : public testing::Test {
 protected:
  SetFigures watch(const PolicyOptions& policy, Report& report) {
    EngineOptions options;
    options.model_dir = CLO_SOURCE_DIR "/models/recall-7m";
    options.backend = Backend::kCpu;
    options.max_batch = 1;
    options.observer = &watcher_;
    auto engine = Engine::load(options);
    EXPECT_TRUE(engine);
    ItemRandom random(3);
    Request request;
    for (int i = 0; i < 700; ++i) {
      request.prompt_ids.push_back(
          static_cast<int32_t>(random.below(static_cast<uint64_t>((*engine)->vocab_size()))));
    }
    request.max_new_tokens = 21;
    request.ignore_eos = true;
    request.policy = policy;
    watcher_.begin();
    const auto response = (*engine)->generate(std::move(request));
    EXPECT_TRUE(response && !response->error);
    report = response->report;
    return watcher_.take();
  }
  SetWatcher watcher_;
};

TEST_F(Watched, AFrozenSetOverlapsWhollyAndOneChosenAnewDoesNot) {
  PolicyOptions policy = *preset("default");
  policy.set_tokens = 64;
  policy.threshold = -1;
  policy.max_label_age = 0;
  Report report;
  const SetFigures frozen = watch(policy, report);
  const int64_t heads = 8 * 2, steps = 20;
  EXPECT_EQ(report.decode_steps, steps);
  EXPECT_EQ(frozen.overlaps, heads * (steps - 1));
  EXPECT_EQ(frozen.mean_overlap(), 1);
  EXPECT_EQ(frozen.modes, 2 * heads * steps);
  policy.threshold = 1.5;
  const SetFigures anew = watch(policy, report);
  EXPECT_EQ(anew.overlaps, frozen.overlaps);
  EXPECT_LT(anew.mean_overlap(), 0.95);
  EXPECT_GT(anew.mean_overlap(), 0.05);
  const SetFigures dense = watch(*preset("dense"), report);
  EXPECT_EQ(dense.overlaps, 0);
  EXPECT_EQ(dense.modes, frozen.modes);
  EXPECT_GE(dense.mean_modes(), 0);
  EXPECT_LE(dense.mean_modes(), 10);
}

}  // namespace
}  // namespace clo
