#include "kernels/prefill/prefill.h"

#include <cstdio>
#include <cstdlib>
#include <tuple>

#include "kernels/gpu_test.h"
#include "kernels/prefill_oracle.h"

namespace clo::kernels {
namespace {

PrefillAttention params_of(const PrefillSizes& sizes, const void* queries, const void* rows,
                           void* out) {
  return {.shape = sizes.shape(),
          .queries = queries,
          .layer_rows = static_cast<const std::byte*>(rows),
          .layer_capacity = sizes.layer_capacity,
          .out = out,
          .first_token = sizes.first_token,
          .num_tokens = sizes.num_tokens,
          .scale = sizes.scale()};
}

// The answer, and a check that nothing past it was written.
std::vector<uint16_t> run(const PrefillCase& given) {
  const PrefillSizes& sizes = given.sizes;
  const int64_t guard = static_cast<int64_t>(sizes.num_q_heads) * sizes.head_dim;
  const DeviceArray<uint16_t> queries(given.queries), rows(given.rows);
  const DeviceArray<uint16_t> out(sizes.query_elements() + guard);
  prefill_attention(params_of(sizes, queries.data(), rows.data(), out.data()), nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  std::vector<uint16_t> result = out.download();
  for (int64_t i = sizes.query_elements(); i < std::ssize(result); ++i) {
    EXPECT_EQ(result[static_cast<size_t>(i)], 0xCBCB) << "written past the end, at " << i;
    if (::testing::Test::HasFailure()) break;
  }
  result.resize(static_cast<size_t>(sizes.query_elements()));
  return result;
}

using HeadsAndDim = std::tuple<std::pair<int32_t, int32_t>, int32_t>;

std::string name_of(const ::testing::TestParamInfo<HeadsAndDim>& info) {
  const auto& [heads, head_dim] = info.param;
  return "q" + std::to_string(heads.first) + "_kv" + std::to_string(heads.second) + "_dim" +
         std::to_string(head_dim);
}

class PrefillAttentionTest : public GpuTest, public ::testing::WithParamInterface<HeadsAndDim> {};

TEST_P(PrefillAttentionTest, MatchesFloat64) {
  const auto [heads, head_dim] = GetParam();
  uint64_t seed = 1;
  for (const int64_t first_token : kTestFirstTokens) {
    for (const int64_t num_tokens : kTestNumTokens) {
      SCOPED_TRACE(::testing::Message()
                   << "first_token " << first_token << ", num_tokens " << num_tokens);
      const PrefillCase given = make_prefill_case({.num_q_heads = heads.first,
                                                   .num_kv_heads = heads.second,
                                                   .head_dim = head_dim,
                                                   .first_token = first_token,
                                                   .num_tokens = num_tokens,
                                                   .layer_capacity = first_token + num_tokens + 70,
                                                   .type = kElementTypes[(seed / 2) % 2]},
                                                  ++seed);
      const OutputError error =
          output_error(given.sizes.type, run(given), reference_attention(given));
      ASSERT_LT(error.relative_l2, kMaxRelativeL2);
      ASSERT_LT(error.max_abs, kMaxAbsolute);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PrefillAttentionTest,
                         ::testing::Combine(::testing::Values(std::pair(1, 1), std::pair(4, 2),
                                                              std::pair(8, 1), std::pair(7, 1),
                                                              std::pair(6, 2), std::pair(32, 8)),
                                            ::testing::Values(64, 128)),
                         name_of);

class PrefillAttentionRules : public GpuTest {};

TEST_F(PrefillAttentionRules, FullBufferHasNoRowToSpare) {
  const PrefillCase given = make_prefill_case({.num_q_heads = 4,
                                               .num_kv_heads = 2,
                                               .first_token = 30,
                                               .num_tokens = 40,
                                               .layer_capacity = 70},
                                              7);
  EXPECT_LT(output_error(given.sizes.type, run(given), reference_attention(given)).max_abs,
            kMaxAbsolute);
}

// Later tokens of the same chunk share tiles with earlier queries; not a bit of them may show.
TEST_F(PrefillAttentionRules, LaterTokensDoNotReachEarlierQueries) {
  for (const int64_t last_clean : {0, 63, 64, 100, 131, 298}) {
    SCOPED_TRACE(last_clean);
    PrefillCase given = make_prefill_case({.num_q_heads = 6,
                                           .num_kv_heads = 2,
                                           .first_token = 45,
                                           .num_tokens = 300,
                                           .layer_capacity = 345},
                                          11);
    const std::vector<uint16_t> clean = run(given);
    const PrefillSizes& sizes = given.sizes;
    for (int32_t head = 0; head < sizes.num_kv_heads; ++head) {
      for (int64_t t = sizes.first_token + last_clean + 1; t < sizes.end_token(); ++t) {
        uint16_t* row = given.row(head, t);
        std::fill_n(row, sizes.head_dim, uint16_t{0x7FC0});                   // NaN keys
        std::fill_n(row + sizes.head_dim, sizes.head_dim, uint16_t{0x7F7F});  // largest values
      }
    }
    std::vector<uint16_t> out = run(given);
    const size_t kept = static_cast<size_t>((last_clean + 1) * sizes.num_q_heads * sizes.head_dim);
    EXPECT_TRUE(
        std::equal(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(kept), clean.begin()));
  }
}

// A query's result depends on its tokens alone, not on which chunk it came in: a prompt that is
// continued from a stored prefix gives the same bits.
TEST_F(PrefillAttentionRules, ChunkingDoesNotChangeABit) {
  const PrefillCase whole = make_prefill_case({.num_q_heads = 7,
                                               .num_kv_heads = 1,
                                               .head_dim = 64,
                                               .num_tokens = 500,
                                               .layer_capacity = 512},
                                              13);
  const std::vector<uint16_t> expected = run(whole);
  const int64_t token_elements = whole.sizes.num_q_heads * whole.sizes.head_dim;
  for (const int64_t cut : {1, 63, 64, 129, 499}) {
    SCOPED_TRACE(cut);
    PrefillCase tail = whole;
    tail.sizes.first_token = cut;
    tail.sizes.num_tokens -= cut;
    tail.queries.erase(tail.queries.begin(), tail.queries.begin() + cut * token_elements);
    const std::vector<uint16_t> out = run(tail);
    EXPECT_TRUE(std::equal(out.begin(), out.end(), expected.begin() + cut * token_elements));
  }
}

// The last head starts past 2^31 elements and 2^32 bytes.
TEST_F(PrefillAttentionRules, OffsetsAre64Bit) {
  const PrefillCase given = make_prefill_case(
      {.num_q_heads = 10, .num_kv_heads = 10, .num_tokens = 130, .layer_capacity = 130}, 17);
  PrefillSizes sizes = given.sizes;
  sizes.layer_capacity = 1 << 20;
  size_t free_bytes = 0, total_bytes = 0;
  CLO_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  const int64_t elements = sizes.num_kv_heads * sizes.head_elements();
  if (free_bytes < static_cast<size_t>(elements) * 2 + (size_t{1} << 30)) {
    GTEST_SKIP() << "needs " << elements * 2 << " bytes of device memory";
  }
  const DeviceArray<uint16_t> queries(given.queries), rows(elements);
  const DeviceArray<uint16_t> out(sizes.query_elements());
  for (int32_t head = 0; head < sizes.num_kv_heads; ++head) {
    CLO_CUDA(cudaMemcpy(rows.data() + head * sizes.head_elements(),
                        given.rows.data() + head * given.sizes.head_elements(),
                        static_cast<size_t>(given.sizes.head_elements()) * 2,
                        cudaMemcpyHostToDevice));
  }
  prefill_attention(params_of(sizes, queries.data(), rows.data(), out.data()), nullptr);
  CLO_CUDA(cudaDeviceSynchronize());
  EXPECT_LT(output_error(given.sizes.type, out.download(), reference_attention(given)).max_abs,
            kMaxAbsolute);
}

TEST(PrefillAttentionFlops, CountsThePairsThatCausalityLeaves) {
  PrefillSizes sizes{.num_q_heads = 2, .head_dim = 64, .first_token = 3, .num_tokens = 2};
  // Queries at tokens 3 and 4 attend 4 and 5 tokens.
  EXPECT_EQ(prefill_attention_flops(params_of(sizes, nullptr, nullptr, nullptr)), 4.0 * 9 * 64 * 2);
}

TEST_F(PrefillAttentionRules, Speed) {
  if (std::getenv("CLO_BENCH") == nullptr) GTEST_SKIP() << "CLO_BENCH is not set";
  for (const auto& [first_token, num_tokens] :
       {std::pair<int64_t, int64_t>{0, 8192}, {0, 32768}, {0, 131072}, {122880, 8192}}) {
    const PrefillSizes sizes{.num_q_heads = 32,
                             .num_kv_heads = 8,
                             .head_dim = 128,
                             .first_token = first_token,
                             .num_tokens = num_tokens,
                             .layer_capacity = first_token + num_tokens};
    const std::vector<uint16_t> noise = to_bits(DType::kBF16, random_floats(1 << 20, 3));
    const DeviceArray<uint16_t> queries(sizes.query_elements()), out(sizes.query_elements());
    const DeviceArray<uint16_t> rows(sizes.num_kv_heads * sizes.head_elements());
    for (const auto* array : {&queries, &rows}) {
      for (int64_t at = 0; at < array->size(); at += 1 << 20) {
        CLO_CUDA(cudaMemcpy(array->data() + at, noise.data(),
                            static_cast<size_t>(std::min<int64_t>(1 << 20, array->size() - at)) * 2,
                            cudaMemcpyHostToDevice));
      }
    }
    const PrefillAttention params = params_of(sizes, queries.data(), rows.data(), out.data());
    cudaEvent_t start, stop;
    CLO_CUDA(cudaEventCreate(&start));
    CLO_CUDA(cudaEventCreate(&stop));
    prefill_attention(params, nullptr);
    constexpr int kRepeats = 3;
    CLO_CUDA(cudaEventRecord(start));
    for (int i = 0; i < kRepeats; ++i) prefill_attention(params, nullptr);
    CLO_CUDA(cudaEventRecord(stop));
    CLO_CUDA(cudaEventSynchronize(stop));
    float ms = 0;
    CLO_CUDA(cudaEventElapsedTime(&ms, start, stop));
    CLO_CUDA(cudaEventDestroy(start));
    CLO_CUDA(cudaEventDestroy(stop));
    ms /= kRepeats;
    std::printf(
        "built-in prefill attention: first_token %ld, num_tokens %ld: %.2f ms, %.0f TFLOP/s\n",
        static_cast<long>(first_token), static_cast<long>(num_tokens), static_cast<double>(ms),
        prefill_attention_flops(params) / ms * 1e-9);
  }
}

}  // namespace
}  // namespace clo::kernels
