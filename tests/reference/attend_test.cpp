// Decode attention over [sink | set | ring] or all rows, and the log-sum-exp over all rows.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <set>

#include "arbitrary.h"
#include "reference/cpu_ops.h"

namespace clo {
namespace {

struct Attended {
  std::vector<float> out, log_sum_exp;
  std::vector<int64_t> rows_read;
  bool same_as(const Attended& other) const {
    return same_bits(out, other.out) && same_bits(log_sum_exp, other.log_sum_exp) &&
           rows_read == other.rows_read;
  }
};

// Runs all tasks in one call; each task's `out` is set here.
Attended run_attend(CpuOps& ops, const KvShape& shape, std::vector<HeadTask> tasks, float scale) {
  const int64_t width = int64_t{shape.group_size()} * shape.head_dim;
  Attended result;
  result.out.assign(tasks.size() * static_cast<size_t>(width), -7.0f);
  result.log_sum_exp.assign(tasks.size() * static_cast<size_t>(shape.group_size()), -7.0f);
  result.rows_read.assign(tasks.size(), -7);
  for (size_t t = 0; t < tasks.size(); ++t) {
    tasks[t].out = result.out.data() + static_cast<int64_t>(t) * width;
  }
  ops.attend({shape, tasks.data(), std::ssize(tasks), scale, result.log_sum_exp.data(),
              result.rows_read.data()});
  return result;
}
Attended run_attend(int threads, const KvShape& shape, const std::vector<HeadTask>& tasks,
                    float scale) {
  CpuOps ops(threads);
  return run_attend(ops, shape, tasks, scale);
}

// Tokens that a head with these slots attends to: each once, wherever else it may also be.
std::vector<int64_t> attended_tokens(const HeadCacheView& head, int64_t context) {
  std::set<int64_t> tokens;
  for (int64_t t = 0; t < context; ++t) {
    if (t < head.sink_tokens || t >= context - head.ring_tokens) tokens.insert(t);
  }
  for (int32_t slot = 0; slot < head.state->num_slots_used; ++slot) {
    if (head.slot_token[slot] >= 0) tokens.insert(head.slot_token[slot]);
  }
  return {tokens.begin(), tokens.end()};
}

// A set of tokens from the sinks on (some still in the ring), in shuffled slots with holes.
std::vector<int32_t> arbitrary_slots(const HeadCacheView& head, int64_t context, Random& random) {
  std::vector<int32_t> tokens;
  for (int64_t t = head.sink_tokens; t < context; ++t) tokens.push_back(static_cast<int32_t>(t));
  for (size_t i = tokens.size(); i > 1; --i) {
    std::swap(tokens[i - 1], tokens[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  const int64_t most = std::min<int64_t>(head.slot_capacity, std::ssize(tokens));
  tokens.resize(static_cast<size_t>(random.below(most + 1)));
  if (head.is_resident()) {
    std::sort(tokens.begin(), tokens.end());
    return tokens;
  }
  for (int32_t& token : tokens) {
    if (random.below(5) == 0) token = -1;
  }
  return tokens;
}

float usual_scale(const KvShape& shape) {
  return 1 / std::sqrt(static_cast<float>(shape.head_dim));
}

RC_GTEST_PROP(Attend, EqualsNaiveAttentionOverSinkSetAndRing, ()) {
  const KvShape shape = arbitrary_shape();
  const int64_t context = arbitrary_length(600);
  Scene scene(shape, arbitrary_heads(shape, context + 3), *rc::gen::arbitrary<uint64_t>());
  Random random(*rc::gen::arbitrary<uint64_t>());
  scene.place(context);
  const std::vector<float> queries = random.normals(int64_t{shape.num_q_heads} * shape.head_dim);
  const int64_t width = int64_t{shape.group_size()} * shape.head_dim;
  std::vector<HeadTask> tasks;
  std::vector<std::vector<int64_t>> tokens;
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    const HeadCacheView& head = scene.views[static_cast<size_t>(h)];
    scene.fill_slots(h, arbitrary_slots(head, context, random));
    tasks.push_back(scene.task(h, queries.data() + h * width, nullptr, context));
    tasks.back().attend_all = head.is_resident() && random.below(2) == 0;
    tokens.push_back(attended_tokens(head, context));
    if (tasks.back().attend_all) {
      tokens.back().resize(static_cast<size_t>(context));
      std::iota(tokens.back().begin(), tokens.back().end(), int64_t{0});
    }
  }
  const float scale = usual_scale(shape);
  const Attended result = run_attend(1, shape, tasks, scale);
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    const auto expected =
        naive_attention(scene, h, tokens[static_cast<size_t>(h)], tasks[h].query, scale, context);
    RC_ASSERT(result.rows_read[h] == std::ssize(tokens[h]));
    RC_ASSERT(largest_error(expected.out, result.out.data() + h * width) < kAttentionError);
    RC_ASSERT(largest_error(expected.log_sum_exp,
                            result.log_sum_exp.data() + h * shape.group_size()) < kAttentionError);
    // A task gives the same bits alone.
    const Attended alone = run_attend(2, shape, {tasks[h]}, scale);
    RC_ASSERT(same_bits(alone.out,
                        {result.out.begin() + h * width, result.out.begin() + (h + 1) * width}));
  }
  RC_ASSERT(result.same_as(run_attend(2, shape, tasks, scale)));
}

TEST(Attend, ManyPartsAreMergedInOrderWhateverTheThreads) {
  for (const auto& [type, stored] : kRowKinds) {
    const KvShape shape{1, 6, 2, 16, type, 64, stored};
    // One head attends 4,099 rows of its own, one 2,500 slots: parts of 1,024 rows, the last short.
    Scene scene(shape, {{4, 60, 10, 4099, true}, {4, 60, 2500, 4099, false}}, 3);
    scene.place(4099);
    std::vector<int32_t> slots(2500);
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = 4 + static_cast<int32_t>(i * 7 % 4030);
    scene.fill_slots(1, slots);
    Random random(4);
    const std::vector<float> queries = random.normals(6 * 16);
    std::vector<HeadTask> tasks = {scene.task(0, queries.data(), nullptr, 4099),
                                   scene.task(1, queries.data() + 48, nullptr, 4099)};
    tasks[0].attend_all = true;
    const Attended one = run_attend(1, shape, tasks, 0.25f);
    EXPECT_TRUE(one.same_as(run_attend(2, shape, tasks, 0.25f)));
    EXPECT_EQ(one.rows_read, (std::vector<int64_t>{4099, 2564}));
    std::vector<int64_t> all(4099);
    std::iota(all.begin(), all.end(), int64_t{0});
    const auto dense = naive_attention(scene, 0, all, tasks[0].query, 0.25, 4099);
    EXPECT_LT(largest_error(dense.out, one.out.data()), kAttentionError);
    EXPECT_LT(largest_error(dense.log_sum_exp, one.log_sum_exp.data()), kAttentionError);
    const auto sparse = naive_attention(scene, 1, attended_tokens(scene.views[1], 4099),
                                        tasks[1].query, 0.25, 4099);
    EXPECT_LT(largest_error(sparse.out, one.out.data() + 48), kAttentionError);
  }
}

TEST(Attend, APartsRowCountAtItsBorders) {
  for (const auto& [type, stored] : kRowKinds)
    for (const int32_t ring : {1, 70, 1024, 1100}) {
      const KvShape shape{1, 1, 1, 16, type, 64, stored};
      Random random(6);
      const std::vector<float> query = random.normals(16);
      for (const int64_t context : {1, 2, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049}) {
        Scene scene(shape, {{0, ring, 1, 2100, true}}, 5);
        scene.place(context);  // the ring is that of this length
        HeadTask task = scene.task(0, query.data(), nullptr, context);
        task.attend_all = true;
        const Attended result = run_attend(2, shape, {task}, 0.25f);
        std::vector<int64_t> all(static_cast<size_t>(context));
        std::iota(all.begin(), all.end(), int64_t{0});
        const auto expected = naive_attention(scene, 0, all, query.data(), 0.25, context);
        EXPECT_LT(largest_error(expected.out, result.out.data()), kAttentionError) << context;
        EXPECT_LT(largest_error(expected.log_sum_exp, result.log_sum_exp.data()), kAttentionError);
      }
    }
}

// Scores of hundreds: no overflow, no loss of the largest; and equal scores far below 0.
TEST(Attend, LargeScoresStayFinite) {
  const KvShape shape{1, 2, 1, 32, DType::kF32, 64};
  Scene scene(shape, {{2, 8, 20, 100, false}}, 7);
  scene.place(100);
  scene.fill_slots(0, {50, 20, -1, 33});
  Random random(8);
  std::vector<float> query = random.normals(64);
  for (const float size : {30.0f, 1000.0f, 1e6f}) {
    std::vector<float> scaled = query;
    for (float& q : scaled) q *= size;
    const HeadTask task = scene.task(0, scaled.data(), nullptr, 100);
    const Attended result = run_attend(1, shape, {task}, 1.0f);
    const auto expected =
        naive_attention(scene, 0, attended_tokens(scene.views[0], 100), scaled.data(), 1.0, 100);
    // An f32 score errs by some 2^-23 of its size, here up to 20 x size.
    EXPECT_LT(largest_error(expected.out, result.out.data()), 1e-5 * size) << size;
    EXPECT_LT(largest_error(expected.log_sum_exp, result.log_sum_exp.data()), 1e-5 * size);
  }
}

class EveryRowKind : public testing::TestWithParam<std::pair<DType, RowFormat>> {
 protected:
  KvShape with_rows(KvShape shape) const {
    shape.type = GetParam().first;
    shape.stored = GetParam().second;
    return shape;
  }
};
std::string name_of(const testing::TestParamInfo<std::pair<DType, RowFormat>>& info) {
  const KvShape shape{1, 1, 1, 16, info.param.first, 0, info.param.second};
  return std::string(kv_type_name(shape)) + "_beside_" + std::string(dtype_name(shape.type));
}
INSTANTIATE_TEST_SUITE_P(Attend, EveryRowKind, testing::ValuesIn(kRowKinds), name_of);

TEST_P(EveryRowKind, ANaNStaysInTheTaskAndQueryItCameFrom) {
  const KvShape shape = with_rows({1, 6, 2, 32, DType::kBF16, 64});
  Scene scene(shape, {{4, 20, 30, 300, false}, {4, 20, 30, 300, true}}, 9);
  scene.place(300);
  Random random(10);
  for (const int32_t h : {0, 1}) {
    scene.fill_slots(h, arbitrary_slots(scene.views[static_cast<size_t>(h)], 300, random));
  }
  std::vector<float> queries = random.normals(4 * 3 * 32);
  const auto tasks = [&] {
    std::vector<HeadTask> made;
    for (int i = 0; i < 4; ++i) {
      made.push_back(scene.task(i % 2, queries.data() + i * 96, nullptr, 300));
    }
    return made;
  };
  CpuOps ops(2);
  const Attended clean = run_attend(ops, shape, tasks(), 0.2f);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    const float kept = std::exchange(queries[1 * 96 + 32 + 5], bad);  // task 1, query head 1
    const Attended broken = run_attend(ops, shape, tasks(), 0.2f);
    queries[1 * 96 + 32 + 5] = kept;
    for (size_t i = 0; i < clean.out.size(); ++i) {
      if (i / 32 == 4) {
        EXPECT_TRUE(std::isnan(broken.out[i])) << i;
      } else {
        EXPECT_EQ(broken.out[i], clean.out[i]) << i;
      }
    }
    for (size_t i = 0; i < clean.log_sum_exp.size(); ++i) {
      if (i != 4) {
        EXPECT_EQ(broken.log_sum_exp[i], clean.log_sum_exp[i]) << i;
      }
    }
    // Nothing of it stays in the scratch of the next step.
    EXPECT_TRUE(clean.same_as(run_attend(ops, shape, tasks(), 0.2f)));
  }
}

// More than one part, so that the merge meets the NaN of one of them.
TEST_P(EveryRowKind, ANaNKeyInOnePartShowsInTheResult) {
  const KvShape shape = with_rows({1, 2, 1, 16, DType::kF32, 64});
  Scene scene(shape, {{0, 1, 1, 3000, true}}, 11);
  scene.keys[2500 * 16 + 3] = NAN;
  scene.place(3000);
  Random random(12);
  const std::vector<float> query = random.normals(32);
  HeadTask task = scene.task(0, query.data(), nullptr, 3000);
  task.attend_all = true;
  Attended result = run_attend(1, shape, {task}, 0.25f);
  for (const float x : result.out) EXPECT_TRUE(std::isnan(x));
  for (const float x : result.log_sum_exp) EXPECT_TRUE(std::isnan(x));
  task.context_tokens = 2500;  // before it
  scene.place(2500);
  result = run_attend(1, shape, {task}, 0.25f);
  for (const float x : result.out) EXPECT_FALSE(std::isnan(x));
}

// The identity slot map attends the same rows in the same order as a resident head does.
TEST(Attend, IdentitySlotsEqualResidentRowsBitForBit) {
  for (const auto& [type, stored] : kRowKinds) {
    const KvShape shape{1, 4, 1, 64, type, 64, stored};
    const int64_t context = 700;
    Scene evictable(shape, {{4, 100, 700, context, false}}, 13);
    Scene resident(shape, {{4, 100, 700, context, true}}, 13);
    evictable.place(context);
    resident.place(context);
    std::vector<int32_t> slots(596);
    std::iota(slots.begin(), slots.end(), 4);
    evictable.fill_slots(0, slots);
    Random random(14);
    const std::vector<float> query = random.normals(4 * 64);
    HeadTask all = resident.task(0, query.data(), nullptr, context);
    all.attend_all = true;
    const Attended a =
        run_attend(1, shape, {evictable.task(0, query.data(), nullptr, context)}, 0.125f);
    EXPECT_TRUE(a.same_as(run_attend(2, shape, {all}, 0.125f)));
    // Sparse over resident rows: the same set, the same bits.
    resident.fill_slots(0, slots);
    EXPECT_TRUE(a.same_as(
        run_attend(1, shape, {resident.task(0, query.data(), nullptr, context)}, 0.125f)));
  }
}

// Half of a compressed row that is not finite poisons its head's result: a key through its score, a
// value through its weight. (In e4m3 an infinity is +-448, so there it must be a NaN.)
TEST(Attend, ACompressedRowThatIsNotFinitePoisonsItsHead) {
  for (const auto& [stored, bad] :
       {std::pair{RowFormat::kInt8, NAN}, std::pair{RowFormat::kInt8, INFINITY},
        std::pair{RowFormat::kFp8, NAN}}) {
    for (const bool in_key : {true, false}) {
      const KvShape shape{1, 4, 2, 64, DType::kBF16, 64, stored};
      Scene scene(shape, {{4, 20, 30, 300, false}, {4, 20, 30, 300, true}}, 9);
      // Token 100 of both heads, one element.
      for (const int32_t h : {0, 1}) {
        auto& values = in_key ? scene.keys : scene.values;
        values[static_cast<size_t>(100 * scene.row_stride() + h * 64 + 17)] = bad;
      }
      scene.place(300);
      Random random(10);
      const std::vector<float> query = random.normals(2 * 64);
      for (const int32_t h : {0, 1}) {
        const HeadTask task = scene.task(h, query.data(), nullptr, 300);
        scene.fill_slots(h, {90, 110});
        for (const float x : run_attend(1, shape, {task}, 0.1f).out) EXPECT_FALSE(std::isnan(x));
        scene.fill_slots(h, {90, 100, 110});
        const std::vector<float> out = run_attend(1, shape, {task}, 0.1f).out;
        for (size_t i = 0; i < out.size(); ++i) {
          // A NaN in an e4m3 value is of its element alone.
          const bool poisoned = in_key || stored == RowFormat::kInt8 || i % 64 == 17;
          EXPECT_EQ(std::isnan(out[i]), poisoned) << i;
        }
      }
    }
  }
}

// Masked rows change nothing, whatever they hold: attention over the others, and the same bits when
// the masked rows are NaN.
RC_GTEST_PROP(Attend, MaskedRowsAreLeftOut, ()) {
  const KvShape shape = arbitrary_shape();
  const int64_t context = arbitrary_length(600);
  Scene scene(shape, arbitrary_heads(shape, context + 3), *rc::gen::arbitrary<uint64_t>());
  Random random(*rc::gen::arbitrary<uint64_t>());
  const TokenMask mask(arbitrary_mask(context));
  scene.view.mask = &mask;
  scene.place(context);
  const std::vector<float> queries = random.normals(int64_t{shape.num_q_heads} * shape.head_dim);
  const int64_t width = int64_t{shape.group_size()} * shape.head_dim;
  const float scale = usual_scale(shape);
  std::vector<HeadTask> tasks;
  std::vector<std::vector<int64_t>> tokens;
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    const HeadCacheView& head = scene.views[static_cast<size_t>(h)];
    std::vector<int32_t> slots = arbitrary_slots(head, context, random);
    if (head.is_resident()) {
      std::erase_if(slots, [&](int32_t t) { return mask.hides(t); });
    } else {
      std::replace_if(
          slots.begin(), slots.end(), [&](int32_t t) { return t >= 0 && mask.hides(t); }, -1);
    }
    scene.fill_slots(h, slots);
    tasks.push_back(scene.task(h, queries.data() + h * width, nullptr, context));
    tasks.back().attend_all = head.is_resident() && random.below(2) == 0;
    tokens.push_back(attended_tokens(head, context));
    if (tasks.back().attend_all) {
      tokens.back().resize(static_cast<size_t>(context));
      std::iota(tokens.back().begin(), tokens.back().end(), int64_t{0});
    }
    std::erase_if(tokens.back(), [&](int64_t t) { return mask.hides(t); });
  }
  std::vector<int64_t> visible(static_cast<size_t>(context));
  std::iota(visible.begin(), visible.end(), int64_t{0});
  std::erase_if(visible, [&](int64_t t) { return mask.hides(t); });
  const Attended result = run_attend(1, shape, tasks, scale);
  std::vector<float> full(static_cast<size_t>(shape.num_q_heads)), full_again = full;
  CpuOps(1).full_scores({shape, tasks.data(), shape.num_kv_heads, scale, full.data()});
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    RC_ASSERT(result.rows_read[h] == std::ssize(tokens[h]));
    const auto expected =
        naive_attention(scene, h, tokens[h], queries.data() + h * width, scale, context);
    RC_ASSERT(largest_error(expected.out, result.out.data() + h * width) < kAttentionError);
    RC_ASSERT(largest_error(expected.log_sum_exp,
                            result.log_sum_exp.data() + h * shape.group_size()) < kAttentionError);
    const auto all = naive_attention(scene, h, visible, queries.data() + h * width, scale, context);
    RC_ASSERT(largest_error(all.log_sum_exp, full.data() + h * shape.group_size()) <
              kAttentionError);
  }
  mask.for_each_masked(0, context, [&](int64_t first, int64_t end) {
    std::fill(scene.keys.begin() + first * scene.row_stride(),
              scene.keys.begin() + end * scene.row_stride(), NAN);
  });
  scene.place(context);
  RC_ASSERT(result.same_as(run_attend(2, shape, tasks, scale)));
  CpuOps(2).full_scores({shape, tasks.data(), shape.num_kv_heads, scale, full_again.data()});
  RC_ASSERT(same_bits(full, full_again));
}

RC_GTEST_PROP(FullScores, EqualTheLogSumExpOfAllRows, ()) {
  const KvShape shape = arbitrary_shape();
  const int64_t context = arbitrary_length(600);
  Scene scene(shape, arbitrary_heads(shape, context + 3), *rc::gen::arbitrary<uint64_t>());
  Random random(*rc::gen::arbitrary<uint64_t>());
  scene.place(context);
  const std::vector<float> queries = random.normals(int64_t{shape.num_q_heads} * shape.head_dim);
  std::vector<HeadTask> tasks;
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    tasks.push_back(
        scene.task(h, queries.data() + h * shape.group_size() * shape.head_dim, nullptr, context));
  }
  std::vector<int64_t> all(static_cast<size_t>(context));
  std::iota(all.begin(), all.end(), int64_t{0});
  std::vector<float> one(static_cast<size_t>(shape.num_q_heads)), two = one;
  const float scale = usual_scale(shape);
  CpuOps(1).full_scores({shape, tasks.data(), shape.num_kv_heads, scale, one.data()});
  CpuOps(2).full_scores({shape, tasks.data(), shape.num_kv_heads, scale, two.data()});
  RC_ASSERT(same_bits(one, two));
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    const auto expected = naive_attention(scene, h, all, tasks[h].query, scale, context);
    RC_ASSERT(largest_error(expected.log_sum_exp, one.data() + h * shape.group_size()) <
              kAttentionError);
  }
}

RC_GTEST_PROP(FullScores, OfListedRowsAreTheirs, ()) {
  const KvShape shape = arbitrary_shape();
  const int64_t context = 200 + arbitrary_length(300);
  Scene scene(shape, arbitrary_heads(shape, context + 3), *rc::gen::arbitrary<uint64_t>());
  Random random(*rc::gen::arbitrary<uint64_t>());
  scene.place(context);
  const std::vector<float> query = random.normals(shape.group_size() * shape.head_dim);
  const HeadTask task = scene.task(0, query.data(), nullptr, context);
  const int64_t first = task.head->sink_tokens, end = context - task.head->ring_tokens;
  RC_PRE(end > first);
  // With replacement: a row that is listed twice counts twice.
  std::vector<int32_t> tokens;
  std::vector<int64_t> listed;
  for (int i = 0; i < 40; ++i) {
    listed.push_back(*rc::gen::inRange<int64_t>(first, end));
    tokens.push_back(static_cast<int32_t>(listed.back()));
  }
  std::vector<float> sum(static_cast<size_t>(shape.group_size()));
  const float scale = usual_scale(shape);
  CpuOps(1).full_scores({shape, &task, 1, scale, sum.data(), tokens.data(), std::ssize(tokens)});
  const auto expected = naive_attention(scene, 0, listed, query.data(), scale, context);
  RC_ASSERT(largest_error(expected.log_sum_exp, sum.data()) < kAttentionError);
}

TEST(Attend, MinEntropyIsOfTheLargestWeight) {
  const KvShape shape{1, 2, 1, 64, DType::kF32, 64};
  Scene scene(shape, {{4, 3000, 30, 3000, true}}, 9);  // three parts, all rows in the ring
  scene.place(2500);
  Random random(10);
  const std::vector<float> query = random.normals(2 * 64);
  std::vector<float> out(2 * 64), lse(2), entropy(2);
  const HeadTask task = scene.task(0, query.data(), out.data(), 2500);
  CpuOps(1).attend({shape, &task, 1, 0.1f, lse.data(), nullptr, entropy.data()});
  for (int g = 0; g < 2; ++g) {
    double largest = -INFINITY;
    for (int64_t t = 0; t < 2500; ++t) {
      double score = 0;
      for (int d = 0; d < 64; ++d) {
        score += double{query[static_cast<size_t>(g * 64 + d)]} *
                 scene.keys[static_cast<size_t>(t * scene.row_stride() + d)];
      }
      largest = std::max(largest, 0.1 * score);
    }
    EXPECT_NEAR(entropy[static_cast<size_t>(g)], lse[static_cast<size_t>(g)] - largest, 1e-4);
  }
}

TEST(KeySpread, IsTheRootMeanSquareAboutTheMean) {
  const KvShape shape{1, 2, 2, 16, DType::kF32, 64};
  Scene scene(shape, {{4, 20, 30, 300, false}, {4, 20, 30, 300, true}}, 3);
  // Head 0: the same key everywhere; head 1: element 0 is 1 and -1 in turn, about a mean of 5.
  for (int64_t t = 0; t < 300; ++t) {
    for (int d = 0; d < 16; ++d) {
      scene.keys[static_cast<size_t>(t * scene.row_stride() + d)] = 3;
      scene.keys[static_cast<size_t>(t * scene.row_stride() + 16 + d)] =
          d == 0 ? (t % 2 == 0 ? 6.0f : 4.0f) : 5.0f;
    }
  }
  scene.place(300);
  const std::vector<float> query(16, 1.0f);
  const std::vector<HeadTask> tasks = {scene.task(0, query.data(), nullptr, 300),
                                       scene.task(1, query.data(), nullptr, 300)};
  std::vector<int32_t> tokens(300);
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<float> spread(2);
  CpuOps(1).key_spread({shape, tasks.data(), 2, tokens.data(), 300, spread.data()});
  EXPECT_NEAR(spread[0], 0, 1e-6);
  EXPECT_NEAR(spread[1], 0.25, 1e-6);  // one dimension of 16 with a deviation of 1
}

}  // namespace
}  // namespace clo
