// Causal attention of a chunk over everything up to it.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "arbitrary.h"
#include "reference/cpu_ops.h"

namespace clo {
namespace {

struct Chunk {
  int64_t first = 0, count = 0;
};

std::vector<float> run_prefill(CpuOps& ops, Scene& scene, const std::vector<float>& queries,
                               int64_t query_stride, const Chunk& chunk, float scale) {
  const int64_t width = int64_t{scene.shape.num_q_heads} * scene.shape.head_dim;
  std::vector<float> out(static_cast<size_t>(chunk.count * width) + 1, -7.0f);
  ops.prefill_attention({scene.shape, scene.view, queries.data(), out.data(), query_stride,
                         chunk.first, chunk.count, scale});
  EXPECT_EQ(out.back(), -7.0f);
  out.pop_back();
  return out;
}

double worst_error(const Scene& scene, const std::vector<float>& queries, int64_t query_stride,
                   const Chunk& chunk, float scale, const std::vector<float>& out) {
  const KvShape& shape = scene.shape;
  const int64_t group_width = int64_t{shape.group_size()} * shape.head_dim;
  double worst = 0;
  std::vector<int64_t> tokens(static_cast<size_t>(chunk.first));
  std::iota(tokens.begin(), tokens.end(), int64_t{0});
  const TokenMask* mask = scene.view.mask;
  if (mask != nullptr) std::erase_if(tokens, [&](int64_t t) { return mask->hides(t); });
  for (int64_t r = 0; r < chunk.count; ++r) {
    // A masked token is seen by its own query alone.
    const int64_t last = chunk.first + r - 1;
    if (mask != nullptr && r > 0 && mask->hides(last)) tokens.pop_back();
    tokens.push_back(chunk.first + r);
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const auto expected = naive_attention(
          scene, h, tokens, queries.data() + r * query_stride + h * group_width, scale, kAllStored);
      const float* found = out.data() + (r * shape.num_kv_heads + h) * group_width;
      worst = std::max(worst, largest_error(expected.out, found));
    }
  }
  return worst;
}

// Chunks start and end anywhere; evictable heads are read from host pages, resident ones from the
// device. Rows after the chunk are NaN, so a mask that lets one through shows.
RC_GTEST_PROP(PrefillAttention, EqualsNaiveCausalAttention, ()) {
  KvShape shape = arbitrary_shape();
  shape.num_q_heads = shape.num_kv_heads * *rc::gen::inRange(1, 4);  // naive loops are slow
  Chunk chunk;
  chunk.first = *rc::gen::element<int64_t>(0, 0, 1, 100, 255, 256, 257, 300);
  chunk.count = *rc::gen::element<int64_t>(1, 2, 5, 16, 47, 48, 49, 70);
  const int64_t end = chunk.first + chunk.count;
  Scene scene(shape, arbitrary_heads(shape, end + 20), *rc::gen::arbitrary<uint64_t>());
  scene.place(end);
  Random random(*rc::gen::arbitrary<uint64_t>());
  const int64_t stride =
      int64_t{shape.num_q_heads} * shape.head_dim + *rc::gen::element<int64_t>(0, 24);
  const std::vector<float> queries = random.normals(chunk.count * stride);
  const float scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  CpuOps one(1), two(2);
  const std::vector<float> out = run_prefill(one, scene, queries, stride, chunk, scale);
  RC_ASSERT(worst_error(scene, queries, stride, chunk, scale, out) < kAttentionError);
  RC_ASSERT(same_bits(out, run_prefill(two, scene, queries, stride, chunk, scale)));
}

RC_GTEST_PROP(PrefillAttention, MaskedTokensAreSeenByThemselvesAlone, ()) {
  KvShape shape = arbitrary_shape();
  shape.num_q_heads = shape.num_kv_heads * *rc::gen::inRange(1, 4);
  Chunk chunk;
  chunk.first = *rc::gen::element<int64_t>(0, 0, 1, 100, 255, 256, 300, 700);
  chunk.count = *rc::gen::element<int64_t>(1, 2, 16, 48, 49, 120);
  const int64_t end = chunk.first + chunk.count;
  Scene scene(shape, arbitrary_heads(shape, end + 20), *rc::gen::arbitrary<uint64_t>());
  const TokenMask mask(arbitrary_mask(end + 1));
  scene.view.mask = &mask;
  scene.place(end);
  Random random(*rc::gen::arbitrary<uint64_t>());
  const int64_t stride = int64_t{shape.num_q_heads} * shape.head_dim;
  const std::vector<float> queries = random.normals(chunk.count * stride);
  const float scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  CpuOps one(1), two(2);
  const std::vector<float> out = run_prefill(one, scene, queries, stride, chunk, scale);
  RC_ASSERT(worst_error(scene, queries, stride, chunk, scale, out) < kAttentionError);
  RC_ASSERT(same_bits(out, run_prefill(two, scene, queries, stride, chunk, scale)));
  // A mask that hides nothing changes no bit.
  const TokenMask nothing(std::vector<TokenRange>{});
  scene.view.mask = &nothing;
  const std::vector<float> open = run_prefill(one, scene, queries, stride, chunk, scale);
  scene.view.mask = nullptr;
  RC_ASSERT(same_bits(open, run_prefill(one, scene, queries, stride, chunk, scale)));
}

TEST(PrefillAttention, WholePagesAndManyTiles) {
  for (const auto& [type, stored] : kRowKinds) {
    const KvShape shape{1, 2, 2, 16, type, 64, stored};
    Scene scene(shape, {{4, 30, 10, 600, false}, {4, 30, 10, 600, true}}, 1);
    Random random(2);
    const std::vector<float> queries = random.normals(600 * 32);
    CpuOps ops(2);
    for (const Chunk& chunk : {Chunk{0, 600}, Chunk{0, 256}, Chunk{256, 256}, Chunk{44, 512}}) {
      scene.place(chunk.first + chunk.count);
      const std::vector<float> out = run_prefill(ops, scene, queries, 32, chunk, 0.25f);
      EXPECT_LT(worst_error(scene, queries, 32, chunk, 0.25f, out), kAttentionError) << chunk.first;
    }
  }
}

// A small chunk after a large one must not see what the large one left in the scratch.
TEST(PrefillAttention, ScratchOfALongerChunkIsNotSeen) {
  const KvShape shape{1, 4, 2, 32, DType::kBF16, 64};
  const std::vector<HeadCacheSpec> heads = {{4, 30, 10, 400, false}, {4, 30, 10, 400, true}};
  Random random(3);
  const std::vector<float> queries = random.normals(400 * 128);
  Scene broken(shape, heads, 4);  // NaN everywhere
  Scene scene(shape, heads, 5);
  scene.place(21);
  CpuOps used(2), fresh(2);
  run_prefill(used, broken, queries, 128, {0, 400}, 0.2f);
  const std::vector<float> out = run_prefill(used, scene, queries, 128, {1, 20}, 0.2f);
  EXPECT_TRUE(same_bits(out, run_prefill(fresh, scene, queries, 128, {1, 20}, 0.2f)));
  EXPECT_LT(worst_error(scene, queries, 128, {1, 20}, 0.2f, out), kAttentionError);
}

TEST(PrefillAttention, ANaNQueryStaysInItsRowAndHead) {
  const KvShape shape{1, 4, 2, 32, DType::kF32, 64};
  Scene scene(shape, {{4, 30, 10, 300, false}, {4, 30, 10, 300, true}}, 6);
  scene.place(300);
  Random random(7);
  std::vector<float> queries = random.normals(100 * 128);
  CpuOps ops(2);
  const std::vector<float> clean = run_prefill(ops, scene, queries, 128, {200, 100}, 0.2f);
  queries[53 * 128 + 2 * 32 + 7] = NAN;
  const std::vector<float> broken = run_prefill(ops, scene, queries, 128, {200, 100}, 0.2f);
  for (size_t i = 0; i < clean.size(); ++i) {
    if (i / 32 == 53 * 4 + 2) {
      EXPECT_TRUE(std::isnan(broken[i])) << i;
    } else {
      EXPECT_EQ(broken[i], clean[i]) << i;
    }
  }
}

TEST(PrefillAttention, ANaNKeyShowsInEveryLaterRow) {
  for (const auto& [type, stored] : kRowKinds) {
    const KvShape shape{1, 2, 1, 16, type, 64, stored};
    Scene scene(shape, {{4, 30, 10, 300, false}}, 8);
    scene.keys[270 * 16 + 3] = NAN;
    scene.place(300);
    Random random(9);
    const std::vector<float> queries = random.normals(60 * 32);
    CpuOps ops(1);
    const std::vector<float> out = run_prefill(ops, scene, queries, 32, {240, 60}, 0.2f);
    for (int64_t r = 0; r < 60; ++r) {
      for (int64_t i = 0; i < 32; ++i) {
        ASSERT_EQ(std::isnan(out[static_cast<size_t>(r * 32 + i)]), 240 + r >= 270) << r;
      }
    }
  }
}

// Compressed rows are read in their stored form whatever chunk they came in, so the result of a
// row is the same, and so is a NaN that only the compressed form has: an int8 half with an
// infinity.
TEST(PrefillAttention, AChunksOwnRowsAreReadAsLaterChunksReadThem) {
  const KvShape shape{1, 2, 1, 32, DType::kF32, 64, RowFormat::kInt8};
  Scene scene(shape, {{4, 30, 10, 300, false}}, 10);
  scene.place(300);
  Random random(11);
  const std::vector<float> queries = random.normals(300 * 64);
  CpuOps ops(2);
  const std::vector<float> whole = run_prefill(ops, scene, queries, 64, {0, 300}, 0.2f);
  const std::vector<float> tail(queries.begin() + 290 * 64, queries.end());
  const std::vector<float> late = run_prefill(ops, scene, tail, 64, {290, 10}, 0.2f);
  EXPECT_TRUE(same_bits(late, {whole.begin() + 290 * 64, whole.end()}));
}

}  // namespace
}  // namespace clo
