// Appending rows and making codes.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "arbitrary.h"
#include "reference/cpu_ops.h"

namespace clo {
namespace {

std::vector<uint64_t> code_of(const HashParams& hash, const float* x, bool is_key = false) {
  std::vector<uint64_t> code(static_cast<size_t>(hash.bits / 64), ~uint64_t{0});
  std::vector<float> scratch(static_cast<size_t>(2 * hash.width));
  encode_row(simd_table(), hash, x, is_key, code.data(), scratch.data());
  return code;
}
bool bit_of(const std::vector<uint64_t>& code, int j) { return (code[j / 64] >> (j % 64)) & 1u; }

// The projections by their definition: base b is H S2 H S1 with H[i][k] = (-1)^popcount(i & k).
std::vector<double> naive_projections(const HashParams& hash, const float* x) {
  std::vector<double> projections;
  const int width = hash.width;
  const uint32_t* signs = hash.signs;
  while (static_cast<int>(projections.size()) < hash.bits) {
    std::vector<double> v(static_cast<size_t>(width), 0.0);
    std::copy_n(x, hash.head_dim, v.begin());
    for (int round = 0; round < 2; ++round, signs += width / 32) {
      std::vector<double> next(v.size(), 0.0);
      for (int i = 0; i < width; ++i) {
        for (int k = 0; k < width; ++k) {
          const bool flipped = (signs[k / 32] >> (k % 32)) & 1u;
          const bool negative = flipped != (__builtin_popcount(static_cast<unsigned>(i & k)) & 1);
          next[i] += negative ? -v[k] : v[k];
        }
      }
      v = next;
    }
    projections.insert(projections.end(), v.begin(), v.end());
  }
  projections.resize(static_cast<size_t>(hash.bits));
  return projections;
}

TEST(EncodeRow, BitsAreThoseOfTheNaiveProjection) {
  Random random(1);
  for (const int32_t dim : {16, 32, 48, 64, 80, 128, 256}) {
    for (const int32_t bits : {64, 128, 192, 256, 512}) {
      const KvShape shape{2, 2, 2, dim, DType::kF32, bits};
      const HashSigns signs(shape, kHashSeed);
      const HashParams hash = signs.params(1, 1);
      std::vector<float> x(static_cast<size_t>(dim));
      for (int repeat = 0; repeat < 3; ++repeat) {
        // Whole numbers: every sum is exact in f32, ties at 0 included, so all bits must agree.
        for (float& value : x) value = static_cast<float>(random.below(17) - 8);
        if (repeat == 2) std::fill(x.begin() + 1, x.end(), 0.0f);
        const std::vector<double> expected = naive_projections(hash, x.data());
        const std::vector<uint64_t> code = code_of(hash, x.data());
        for (int j = 0; j < bits; ++j) {
          ASSERT_EQ(bit_of(code, j), expected[j] > 0) << dim << " " << bits << " bit " << j;
        }
      }
      // Any numbers: bits whose projection is not within rounding of 0.
      x = random.normals(dim);
      const std::vector<double> expected = naive_projections(hash, x.data());
      const std::vector<uint64_t> code = code_of(hash, x.data());
      for (int j = 0; j < bits; ++j) {
        if (std::abs(expected[j]) < 1e-4 * dim) continue;
        ASSERT_EQ(bit_of(code, j), expected[j] > 0) << dim << " " << bits << " bit " << j;
      }
    }
  }
}

TEST(EncodeRow, TrainedWeightsTakeTheSignsPlace) {
  Random random(2);
  for (const int32_t dim : {16, 48, 128}) {
    for (const int32_t bits : {64, 128, 256}) {
      const std::vector<float> weights = random.normals(hash_weight_count(dim, bits));
      HashParams hash;
      hash.weights = weights.data();
      hash.head_dim = dim;
      hash.width = hash_width(dim);
      hash.bits = bits;
      const std::vector<float> x = random.normals(dim);
      for (const bool is_key : {false, true}) {
        const std::vector<uint64_t> code = code_of(hash, x.data(), is_key);
        for (int j = 0; j < bits; ++j) {
          // The same order of f32 operations, so that every backend computes the same bit. A key's
          // begin with the bias.
          float sum = is_key ? weights[dim * bits + j] : 0;
          for (int d = 0; d < dim; ++d) {
            const float product = x[d] * weights[d * bits + j];
            sum += product;
          }
          ASSERT_EQ(bit_of(code, j), sum > 0) << dim << " " << bits << " bit " << j;
        }
      }
    }
  }
}

TEST(EncodeRow, IsTheSameOnEveryTable) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) GTEST_SKIP();
  Random random(3);
  const KvShape shape{1, 1, 1, 128, DType::kF32, 512};
  const HashSigns signs(shape, kHashSeed);
  const HashParams hash = signs.params(0, 0);
  for (int i = 0; i < 200; ++i) {
    const std::vector<float> x = random.normals(128);
    uint64_t plain[8], wide[8];
    float scratch[256];
    encode_row(simd_baseline(), hash, x.data(), true, plain, scratch);
    encode_row(simd_avx2(), hash, x.data(), true, wide, scratch);
    ASSERT_TRUE(std::equal(plain, plain + 8, wide));
  }
#endif
}

TEST(EncodeRow, ANaNGivesNoBits) {
  const KvShape shape{1, 1, 1, 64, DType::kF32, 128};
  const HashSigns signs(shape, kHashSeed);
  std::vector<float> x(64, 1.0f);
  x[7] = NAN;
  EXPECT_EQ(code_of(signs.params(0, 0), x.data()), (std::vector<uint64_t>{0, 0}));
}

int weight_of(const GradedQuery& query, int words, int j) {
  int weight = 0;
  for (int p = 0; p < kWeightPlanes; ++p) {
    weight += static_cast<int>(query.planes[p * words + j / 64] >> (j % 64) & 1u) << p;
  }
  return weight;
}

TEST(GradeQuery, WeighsBitsByTheProjectionOfTheSum) {
  Random random(5);
  for (const int32_t group : {1, 3, 8}) {
    for (const int32_t bits : {64, 128, 256, 320, 512}) {
      const KvShape shape{1, group, 1, 48, DType::kF32, bits};
      const HashSigns signs(shape, kHashSeed);
      const HashParams hash = signs.params(0, 0);
      const std::vector<float> queries = random.normals(int64_t{group} * 48);
      std::vector<float> sum(48, 0.0f);
      for (int g = 0; g < group; ++g) {
        for (int d = 0; d < 48; ++d) sum[d] += queries[g * 48 + d];
      }
      const std::vector<double> projected = naive_projections(hash, sum.data());
      double largest = 0;
      for (const double v : projected) largest = std::max(largest, std::abs(v));
      const GradedQuery query = grade_query(simd_table(), hash, queries.data(), group);
      EXPECT_EQ(query.most, bits <= 256 ? 7 : bits == 320 ? 6 : 4);
      int of_most = 0;
      for (int j = 0; j < bits; ++j) {
        const int weight = weight_of(query, bits / 64, j);
        const double exact = std::abs(projected[j]) * (query.most + 1) / largest;
        if (std::abs(exact - std::floor(exact) - 0.5) > 1e-4) {
          ASSERT_EQ(weight, std::min(query.most, static_cast<int>(exact + 0.5)))
              << bits << " " << j;
        }
        if (weight > 0) {
          ASSERT_EQ((query.signs[j / 64] >> (j % 64) & 1u) != 0, projected[j] > 0);
        }
        of_most += weight == query.most;
      }
      EXPECT_GE(of_most, 1);
    }
  }
}

TEST(GradeQuery, HasNoBias) {
  Random random(8);
  const std::vector<float> query = random.normals(16);
  std::vector<float> weights = random.normals(hash_weight_count(16, 64));
  HashParams hash;
  hash.weights = weights.data();
  hash.head_dim = 16;
  hash.width = hash_width(16);
  hash.bits = 64;
  const GradedQuery before = grade_query(simd_table(), hash, query.data(), 1);
  const std::vector<uint64_t> key_before = code_of(hash, query.data(), true);
  for (int j = 0; j < 64; ++j) weights[16 * 64 + j] += 100;
  const GradedQuery after = grade_query(simd_table(), hash, query.data(), 1);
  EXPECT_TRUE(std::equal(before.signs, before.signs + 1, after.signs));
  EXPECT_TRUE(std::equal(before.planes, before.planes + kWeightPlanes, after.planes));
  EXPECT_NE(key_before, code_of(hash, query.data(), true));
}

TEST(GradeQuery, NumbersThatAreNotFiniteWeighNothing) {
  std::vector<float> values(64, 1.0f);
  values[3] = NAN;
  const GradedQuery with_nan = grade_projection(values);
  EXPECT_EQ(weight_of(with_nan, 1, 3), 0);
  EXPECT_EQ(weight_of(with_nan, 1, 4), 7);
  values[3] = -INFINITY;
  const GradedQuery infinite = grade_projection(values);
  for (int j = 0; j < 64; ++j) EXPECT_EQ(weight_of(infinite, 1, j), 0) << j;
  const GradedQuery zero = grade_projection(std::vector<float>(64, 0.0f));
  for (int j = 0; j < 64; ++j) EXPECT_EQ(weight_of(zero, 1, j), 0) << j;
}

TEST(GradedDistances, AreTheSumsOfTheWeightsOfBitsThatDiffer) {
  Random random(6);
  std::vector<const SimdTable*> tables = {&simd_baseline(), &simd_table()};
  for (const int words : {1, 2, 3, 4, 8}) {
    GradedQuery query;
    query.most = most_bit_weight(64 * words);
    const auto word = [&] { return static_cast<uint64_t>(random.below(INT64_MAX)) * 2; };
    for (int w = 0; w < words; ++w) query.signs[w] = word();
    // Weights up to 7, or to 3 where distances would be more than are counted.
    const int planes = query.most == 7 ? 3 : 2;
    for (int w = 0; w < planes * words; ++w) query.planes[w] = word();
    std::vector<uint64_t> codes(static_cast<size_t>(words) * 37);
    for (uint64_t& code : codes) code = word();
    for (const SimdTable* table : tables) {
      std::vector<uint16_t> distances(37);
      std::vector<uint32_t> histogram(static_cast<size_t>(64 * words * query.most + 1), 0);
      std::vector<uint32_t> counted = histogram;
      table->graded(codes.data(), words, 37, query.signs, query.planes, distances.data(),
                    histogram.data());
      for (int64_t t = 0; t < 37; ++t) {
        int distance = 0;
        for (int j = 0; j < 64 * words; ++j) {
          const bool differs =
              ((codes[t * words + j / 64] ^ query.signs[j / 64]) >> (j % 64) & 1u) != 0;
          distance += differs ? weight_of(query, words, j) : 0;
        }
        ASSERT_EQ(distances[t], distance) << words << " " << t;
        ++counted[static_cast<size_t>(distance)];
      }
      EXPECT_EQ(histogram, counted);
    }
  }
}

// Keys that are close share more bits than keys that are far.
TEST(EncodeRow, NearVectorsHaveNearCodes) {
  Random random(4);
  const KvShape shape{1, 1, 1, 64, DType::kF32, 128};
  const HashSigns signs(shape, kHashSeed);
  const HashParams hash = signs.params(0, 0);
  const auto distance = [&](const std::vector<float>& a, const std::vector<float>& b) {
    const auto x = code_of(hash, a.data()), y = code_of(hash, b.data());
    return __builtin_popcountll(x[0] ^ y[0]) + __builtin_popcountll(x[1] ^ y[1]);
  };
  for (int i = 0; i < 20; ++i) {
    const std::vector<float> x = random.normals(64), far = random.normals(64);
    std::vector<float> near = x, opposite = x;
    for (size_t d = 0; d < 64; ++d) near[d] += 0.1f * far[d], opposite[d] = -x[d];
    EXPECT_EQ(distance(x, x), 0);
    EXPECT_LT(distance(x, near), 20);  // 6 degrees of 180: about 4 bits of 128
    EXPECT_GT(distance(x, far), 30);   // at right angles: about 64
    EXPECT_EQ(distance(x, opposite), 128);
  }
}

// Writes tokens [first, end) of a scene through append.
AppendParams append_params(const Scene& scene, const int64_t& first, int64_t count,
                           const std::vector<HashParams>& hashes) {
  AppendParams params;
  params.shape = scene.shape;
  params.sequences = &scene.view;
  params.first_token = &first;
  params.hashes = hashes.empty() ? nullptr : hashes.data();
  params.keys = scene.keys.data() + first * scene.row_stride();
  params.values = scene.values.data() + first * scene.row_stride();
  params.row_stride = scene.row_stride();
  params.num_sequences = 1;
  params.tokens_per_sequence = count;
  return params;
}

std::vector<HashParams> hashes_of(const HashSigns& signs, const KvShape& shape) {
  std::vector<HashParams> hashes;
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) hashes.push_back(signs.params(0, h));
  return hashes;
}

void place_codes(Scene& scene, int64_t context, const std::vector<HashParams>& hashes) {
  const int words = scene.shape.code_words();
  for (int64_t t = 0; t < context; ++t) {
    for (int32_t h = 0; h < scene.shape.num_kv_heads; ++h) {
      std::vector<float> stored(static_cast<size_t>(scene.shape.head_dim));
      for (int d = 0; d < scene.shape.head_dim; ++d) stored[d] = scene.rounded(scene.key(t, h) + d);
      const std::vector<uint64_t> code = code_of(hashes[h], stored.data(), true);
      for (const auto& pages : {scene.host_codes, scene.device_codes}) {
        std::copy(code.begin(), code.end(),
                  pages[t / kPageTokens] + (h * kPageTokens + t % kPageTokens) * words);
      }
    }
  }
}

bool same_memory(const Scene& a, const Scene& b) {
  return a.blocks == b.blocks && a.pages == b.pages && a.pages_of_codes == b.pages_of_codes;
}

// Chunks of any length, longer than the ring or shorter, then single tokens: memory is always
// what placing all tokens at once would leave, byte for byte.
RC_GTEST_PROP(Append, LeavesEveryRowWhereItBelongs, ()) {
  const KvShape shape = arbitrary_shape();
  const int64_t capacity = 300;
  const auto heads = arbitrary_heads(shape, capacity);
  const auto seed = *rc::gen::arbitrary<uint64_t>();
  const auto threads = *rc::gen::inRange(1, 3);
  const HashSigns signs(shape, kHashSeed);
  std::vector<HashParams> hashes = hashes_of(signs, shape);
  // Trained ones, whose biases are large enough to be seen.
  const std::vector<float> weights =
      Random(seed).normals(hash_weight_count(shape.head_dim, shape.code_bits));
  if (*rc::gen::arbitrary<bool>()) {
    for (HashParams& hash : hashes) hash.weights = weights.data();
  }
  Scene appended(shape, heads, seed);
  int64_t context = 0;
  CpuOps ops(threads);
  for (const int64_t chunk : *rc::gen::container<std::vector<int64_t>>(
           rc::gen::element<int64_t>(1, 1, 1, 2, 17, 100, 250))) {
    const int64_t count = std::min(chunk, capacity - context);
    if (count == 0) break;
    ops.append(append_params(appended, context, count, hashes));
    context += count;
  }
  Scene placed(shape, heads, seed);
  placed.place(context);
  place_codes(placed, context, hashes);
  // Rows of the ring that a prefill chunk never passed through stay unwritten in both.
  RC_ASSERT(same_memory(appended, placed));
}

TEST(Append, WithoutHostPagesOrCodesWritesOnlyTheDevice) {
  const KvShape shape{1, 2, 2, 32, DType::kBF16, 64};
  const std::vector<HeadCacheSpec> heads(2, {0, 1, 1, 40, true});
  const HashSigns signs(shape, kHashSeed);
  const auto hashes = hashes_of(signs, shape);
  const Scene untouched(shape, heads, 1);
  {
    Scene scene(shape, heads, 1), expected(shape, heads, 1);
    scene.view.host_rows = nullptr;
    scene.view.host_codes = nullptr;
    CpuOps(1).append(append_params(scene, 0, 40, hashes));
    expected.place(40);
    EXPECT_TRUE(scene.pages == untouched.pages);
    EXPECT_TRUE(scene.blocks == expected.blocks);
    place_codes(expected, 40, hashes);
    EXPECT_TRUE(scene.pages_of_codes[0] == untouched.pages_of_codes[0]);  // host
    EXPECT_TRUE(scene.pages_of_codes[1] == expected.pages_of_codes[1]);   // device
  }
  {
    Scene scene(shape, heads, 1);
    CpuOps(1).append(append_params(scene, 0, 40, {}));
    EXPECT_TRUE(scene.pages_of_codes == untouched.pages_of_codes);
  }
}

TEST(Append, SequencesOfABatchMeetOnlyTheirOwnMemory) {
  const KvShape shape{1, 4, 2, 32, DType::kF32, 128};
  const std::vector<HeadCacheSpec> heads = {{4, 20, 10, 300, false}, {4, 20, 10, 300, true}};
  const HashSigns signs(shape, kHashSeed);
  const auto hashes = hashes_of(signs, shape);
  for (const int threads : {1, 2}) {
    std::vector<std::unique_ptr<Scene>> scenes;
    std::vector<SequenceLayerView> views;
    const std::vector<int64_t> lengths = {7, 256, 19, 299};
    std::vector<float> keys, values;
    CpuOps ops(threads);
    for (size_t s = 0; s < lengths.size(); ++s) {
      scenes.push_back(std::make_unique<Scene>(shape, heads, s));
      Scene& scene = *scenes.back();
      const int64_t zero = 0;
      ops.append(append_params(scene, zero, lengths[s], hashes));
      views.push_back(scene.view);
      const float* key = scene.key(lengths[s], 0);
      const float* value = scene.value(lengths[s], 0);
      keys.insert(keys.end(), key, key + scene.row_stride());
      values.insert(values.end(), value, value + scene.row_stride());
    }
    AppendParams params;
    params.shape = shape;
    params.sequences = views.data();
    params.first_token = lengths.data();
    params.hashes = hashes.data();
    params.keys = keys.data();
    params.values = values.data();
    params.row_stride = int64_t{2} * 32;
    params.num_sequences = std::ssize(lengths);
    params.tokens_per_sequence = 1;
    ops.append(params);
    for (size_t s = 0; s < lengths.size(); ++s) {
      Scene expected(shape, heads, s);
      expected.place(lengths[s] + 1);
      place_codes(expected, lengths[s] + 1, hashes);
      EXPECT_TRUE(same_memory(*scenes[s], expected)) << s;
    }
  }
}

}  // namespace
}  // namespace clo
