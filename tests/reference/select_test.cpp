// Cosine against labels, and choosing sets.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <set>

#include "arbitrary.h"
#include "reference/cpu_ops.h"

namespace clo {
namespace {

// The first `count` of the candidates by (worse, token), in token order.
template <typename Badness>
std::vector<int32_t> naive_choice(const TokenMask& mask, int64_t first, int64_t end, int64_t count,
                                  const Badness& badness) {
  std::vector<int32_t> tokens(static_cast<size_t>(end - first));
  std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(first));
  std::erase_if(tokens, [&](int32_t t) { return mask.hides(t); });
  std::stable_sort(tokens.begin(), tokens.end(),
                   [&](int32_t a, int32_t b) { return badness(a) < badness(b); });
  tokens.resize(static_cast<size_t>(count));
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

struct Range {
  int64_t first, end;
  int32_t count;
};
Range arbitrary_range(int64_t context, const TokenMask& mask) {
  Range range;
  range.first = *rc::gen::inRange<int64_t>(0, context);
  range.end = *rc::gen::inRange<int64_t>(range.first, context + 1);
  const int64_t size = mask.num_visible(range.first, range.end);
  const std::vector<int64_t> ends = {std::min<int64_t>(1, size), std::max<int64_t>(0, size - 1),
                                     size};
  range.count = static_cast<int32_t>(
      *rc::gen::oneOf(rc::gen::inRange<int64_t>(0, size + 1), rc::gen::elementOf(ends)));
  return range;
}

std::vector<int32_t> run_select(int threads, Scene& scene, const SelectTask& task, float scale) {
  SelectTask one = task;
  // One more than asked for: it must stay as it is.
  std::vector<int32_t> tokens(static_cast<size_t>(task.num_select) + 1, -77);
  one.tokens = tokens.data();
  CpuOps(threads).select({scene.shape, &one, 1, scale});
  EXPECT_EQ(tokens.back(), -77);
  tokens.pop_back();
  return tokens;
}

RC_GTEST_PROP(Select, HashesTakeTheNearestCodesLowerTokensFirst, ()) {
  const KvShape shape = arbitrary_shape();
  const int64_t context = arbitrary_length(700);
  Scene scene(shape, arbitrary_heads(shape, context), *rc::gen::arbitrary<uint64_t>());
  const auto seed = *rc::gen::arbitrary<uint64_t>();
  Random random(seed);
  const HashSigns signs(shape, kHashSeed);
  const auto head = *rc::gen::inRange(0, shape.num_kv_heads);
  HashParams hash = signs.params(0, head);
  const std::vector<float> weights =
      random.normals(hash_weight_count(shape.head_dim, shape.code_bits));
  if (*rc::gen::arbitrary<bool>()) hash.weights = weights.data();
  const std::vector<float> query = random.normals(int64_t{shape.group_size()} * shape.head_dim);
  const int words = shape.code_words();

  // Few distinct codes make many ties; some equal a query's code.
  std::vector<std::vector<uint64_t>> query_codes, kinds;
  for (int g = 0; g < shape.group_size(); ++g) {
    std::vector<uint64_t> code(static_cast<size_t>(words));
    std::vector<float> scratch(static_cast<size_t>(2 * hash.width));
    encode_row(simd_table(), hash, query.data() + g * shape.head_dim, false, code.data(),
               scratch.data());
    query_codes.push_back(code);
  }
  kinds.push_back(query_codes[0]);
  const auto num_kinds = *rc::gen::element<int64_t>(1, 2, 5, 1000);
  while (std::ssize(kinds) < num_kinds) {
    std::vector<uint64_t> code(static_cast<size_t>(words));
    for (uint64_t& word : code) word = static_cast<uint64_t>(random.below(INT64_MAX)) * 2;
    kinds.push_back(code);
  }
  const bool is_graded = *rc::gen::arbitrary<bool>();
  const GradedQuery graded = grade_query(simd_table(), hash, query.data(), shape.group_size());
  std::vector<int> distance(static_cast<size_t>(context), 0);
  for (int64_t t = 0; t < context; ++t) {
    const auto& code = kinds[static_cast<size_t>(random.below(num_kinds))];
    std::copy(code.begin(), code.end(),
              scene.device_codes[static_cast<size_t>(t / kPageTokens)] +
                  (head * kPageTokens + t % kPageTokens) * words);
    if (is_graded) {
      for (int w = 0; w < words; ++w) {
        for (int p = 0; p < kWeightPlanes; ++p) {
          const uint64_t differs = (code[w] ^ graded.signs[w]) & graded.planes[p * words + w];
          distance[t] += __builtin_popcountll(differs) << p;
        }
      }
      continue;
    }
    for (const auto& of_query : query_codes) {
      for (int w = 0; w < words; ++w) distance[t] += __builtin_popcountll(code[w] ^ of_query[w]);
    }
  }
  const TokenMask mask(*rc::gen::arbitrary<bool>() ? arbitrary_mask(context)
                                                   : std::vector<TokenRange>{});
  const bool masked = mask.num_visible(0, context) < context;
  if (masked) scene.view.mask = &mask;
  const Range range = arbitrary_range(context, mask);
  SelectTask task;
  task.head = scene.task(head, query.data(), nullptr, context);
  task.hash = &hash;
  task.kind = is_graded ? SelectKind::kGradedHash : SelectKind::kHash;
  task.first_candidate = range.first;
  task.end_candidate = range.end;
  task.num_select = range.count;
  RC_ASSERT(run_select(1, scene, task, 1) ==
            naive_choice(mask, range.first, range.end, range.count,
                         [&](int32_t t) { return distance[static_cast<size_t>(t)]; }));
}

RC_GTEST_PROP(Select, ExactTakesTheLargestWeightsLowerTokensFirst, ()) {
  const KvShape shape = arbitrary_shape();
  const int64_t context = arbitrary_length(600);
  Scene scene(shape, arbitrary_heads(shape, context), *rc::gen::arbitrary<uint64_t>());
  Random random(*rc::gen::arbitrary<uint64_t>());
  const auto head = *rc::gen::inRange(0, shape.num_kv_heads);
  const int dim = shape.head_dim, group = shape.group_size();
  // Every key is one of a few, so that whole classes of tokens tie.
  const int64_t num_kinds = *rc::gen::element<int64_t>(1, 2, 7);
  std::vector<int64_t> kind(static_cast<size_t>(context));
  for (int64_t t = 0; t < context; ++t) {
    kind[t] = random.below(num_kinds);
    float* key = scene.keys.data() + t * scene.row_stride() + int64_t{head} * dim;
    Random of_kind(static_cast<uint64_t>(kind[t]) + 1000);
    for (int d = 0; d < dim; ++d) key[d] = of_kind.normal();
  }
  scene.place(context);
  const std::vector<float> query = random.normals(int64_t{group} * dim);
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  const TokenMask mask(*rc::gen::arbitrary<bool>() ? arbitrary_mask(context)
                                                   : std::vector<TokenRange>{});
  const bool masked = mask.num_visible(0, context) < context;
  if (masked) scene.view.mask = &mask;
  const Range range = arbitrary_range(context, mask);

  std::vector<double> weight(static_cast<size_t>(context), 0.0);
  for (int g = 0; g < group; ++g) {
    std::vector<double> of_query;
    double total = 0;
    for (int64_t t = range.first; t < range.end; ++t) {
      of_query.push_back(0);
      if (mask.hides(t)) continue;
      double dot = 0;
      const std::vector<float> row = scene.row_values(t, head, false);
      for (int d = 0; d < dim; ++d) dot += static_cast<double>(query[g * dim + d]) * row[d];
      of_query.back() = std::exp(dot * scale);
      total += of_query.back();
    }
    for (int64_t t = range.first; t < range.end; ++t) {
      weight[t] += of_query[static_cast<size_t>(t - range.first)] / total;
    }
  }
  // Kinds whose weights f32 cannot tell apart have no right order.
  std::set<double> distinct;
  for (int64_t t = range.first; t < range.end; ++t) {
    if (!mask.hides(t)) distinct.insert(weight[t]);
  }
  double last = -1;
  for (const double w : distinct) {
    RC_PRE(w == last || w - last > 1e-4 * w || w - last < 1e-12 * w);
    last = w;
  }
  SelectTask task;
  task.head = scene.task(head, query.data(), nullptr, context);
  task.kind = SelectKind::kExact;
  task.first_candidate = range.first;
  task.end_candidate = range.end;
  task.num_select = range.count;
  std::vector<int32_t> chosen = run_select(1, scene, task, scale);
  RC_ASSERT(chosen == naive_choice(mask, range.first, range.end, range.count, [&](int32_t t) {
              // Tokens of one kind have one weight.
              double of_kind = 0;
              for (int64_t u = range.first; u < range.end; ++u) {
                if (kind[u] == kind[t] && !mask.hides(u)) {
                  of_kind = weight[u];
                  break;
                }
              }
              return -of_kind;
            }));
}

RC_GTEST_PROP(Select, RandomTakesAsManyAsAskedFor, ()) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 64};
  const int64_t context = arbitrary_length(700);
  Scene scene(shape, arbitrary_heads(shape, context), 1);
  const TokenMask mask(*rc::gen::arbitrary<bool>() ? arbitrary_mask(context)
                                                   : std::vector<TokenRange>{});
  const bool masked = mask.num_visible(0, context) < context;
  if (masked) scene.view.mask = &mask;
  const Range range = arbitrary_range(context, mask);
  const std::vector<float> query(16, 1.0f);
  SelectTask task;
  task.head = scene.task(0, query.data(), nullptr, context);
  task.kind = SelectKind::kRandom;
  task.random_seed = *rc::gen::arbitrary<uint64_t>();
  task.first_candidate = range.first;
  task.end_candidate = range.end;
  task.num_select = range.count;
  const std::vector<int32_t> chosen = run_select(1, scene, task, 1);
  RC_ASSERT(std::adjacent_find(chosen.begin(), chosen.end(), std::greater_equal<>()) ==
            chosen.end());
  if (!chosen.empty()) {
    RC_ASSERT(chosen.front() >= range.first);
    RC_ASSERT(chosen.back() < range.end);
  }
  for (const int32_t token : chosen) RC_ASSERT(!mask.hides(token));
  RC_ASSERT(chosen == run_select(2, scene, task, 1));  // the seed decides alone
}

TEST(Select, RandomIsEvenAndFollowsTheSeed) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 64};
  Scene scene(shape, {{0, 1, 1, 200, false}}, 1);
  const std::vector<float> query(16, 1.0f);
  SelectTask task;
  task.head = scene.task(0, query.data(), nullptr, 200);
  task.kind = SelectKind::kRandom;
  task.first_candidate = 0;
  task.end_candidate = 200;
  task.num_select = 50;
  std::vector<int> taken(200, 0);
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    task.random_seed = seed << 20;
    for (const int32_t t : run_select(1, scene, task, 1)) ++taken[static_cast<size_t>(t)];
  }
  // Binomial(2000, 1/4): 500 with a standard deviation of 19.4; six of them on either side.
  for (const int count : taken) EXPECT_NEAR(count, 500, 116);
}

TEST(Select, ManyTasksAtOnceAreEachTheirOwn) {
  const KvShape shape{1, 6, 3, 32, DType::kBF16, 128};
  Scene scene(shape, std::vector<HeadCacheSpec>(3, {0, 1, 1, 600, false}), 5);
  scene.place(600);
  Random random(6);
  const HashSigns signs(shape, kHashSeed);
  std::vector<HashParams> hashes;
  for (int32_t h = 0; h < 3; ++h) hashes.push_back(signs.params(0, h));
  for (Bytes& page : scene.pages_of_codes) {
    auto* bytes = reinterpret_cast<uint8_t*>(page.data());
    for (int64_t i = 0; i < int64_t{3} * kPageTokens * 16; ++i) {
      bytes[i] = static_cast<uint8_t>(random.below(256));
    }
  }
  const std::vector<float> queries = random.normals(30 * 2 * 32);
  std::vector<SelectTask> tasks;
  std::vector<std::vector<int32_t>> expected, found;
  for (int i = 0; i < 30; ++i) {
    SelectTask task;
    task.head = scene.task(i % 3, queries.data() + i * 64, nullptr, 600);
    task.hash = &hashes[static_cast<size_t>(i % 3)];
    task.kind = i % 4 == 0   ? SelectKind::kExact
                : i % 4 == 1 ? SelectKind::kRandom
                : i % 4 == 2 ? SelectKind::kHash
                             : SelectKind::kGradedHash;
    task.random_seed = static_cast<uint64_t>(i);
    task.first_candidate = i;
    task.end_candidate = 600 - 3 * i;
    task.num_select = 16 * i;
    tasks.push_back(task);
    expected.push_back(run_select(1, scene, task, 0.2f));
    found.emplace_back(expected.back().size(), -1);
  }
  for (size_t i = 0; i < tasks.size(); ++i) tasks[i].tokens = found[i].data();
  CpuOps(2).select({shape, tasks.data(), 30, 0.2f});
  EXPECT_EQ(found, expected);
}

TEST(Select, ANaNQueryStillChoosesTheNumberAskedFor) {
  const KvShape shape{1, 1, 1, 16, DType::kF32, 64};
  Scene scene(shape, {{0, 1, 1, 100, false}}, 1);
  scene.place(100);
  const HashSigns signs(shape, kHashSeed);
  const HashParams hash = signs.params(0, 0);
  const std::vector<float> query(16, NAN);
  for (const SelectKind kind : {SelectKind::kExact, SelectKind::kHash, SelectKind::kGradedHash}) {
    SelectTask task;
    task.head = scene.task(0, query.data(), nullptr, 100);
    task.hash = &hash;
    task.kind = kind;
    task.first_candidate = 3;
    task.end_candidate = 90;
    task.num_select = 20;
    const std::vector<int32_t> chosen = run_select(1, scene, task, 1);
    EXPECT_EQ(std::set<int32_t>(chosen.begin(), chosen.end()).size(), 20u);
    EXPECT_GE(chosen.front(), 3);
    EXPECT_LT(chosen.back(), 90);
  }
}

TEST(Cosine, EqualsTheDefinitionAndIsNaNWhereItHasNone) {
  for (const int32_t dim : {16, 64, 128}) {
    const KvShape shape{1, 5, 1, dim, DType::kBF16, 64};
    Scene scene(shape, {{0, 1, 1, 10, false}}, 1);
    Random random(7);
    std::vector<float> query = random.normals(5 * dim), label = random.normals(5 * dim);
    std::copy_n(query.begin(), dim, label.begin());               // group 0: the same
    std::fill_n(query.begin() + 2 * dim, dim, 0.0f);              // group 2: a zero query
    label[3 * dim + 1] = std::numeric_limits<float>::infinity();  // group 3
    query[4 * dim + 2] = NAN;                                     // group 4
    set_label(shape, scene.views[0], label.data(), 5, 5);
    const HeadTask task = scene.task(0, query.data(), nullptr, 5);
    std::vector<float> cosine(5, -7.0f);
    CpuOps(1).cosine({shape, &task, cosine.data(), 1});
    EXPECT_NEAR(cosine[0], 1.0, 1e-6);
    double dot = 0, q = 0, l = 0;
    for (int d = dim; d < 2 * dim; ++d) {
      dot += static_cast<double>(query[d]) * label[d];
      q += static_cast<double>(query[d]) * query[d];
      l += static_cast<double>(label[d]) * label[d];
    }
    EXPECT_NEAR(cosine[1], dot / std::sqrt(q * l), 2e-6);  // 128 f32 terms
    for (const size_t g : {2u, 3u, 4u}) EXPECT_TRUE(std::isnan(cosine[g])) << g;
  }
}

}  // namespace
}  // namespace clo
