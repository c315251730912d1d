#include "kernels/prefill/sdpa.h"

#include <chrono>
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

class SdpaTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) make(Sdpa::KernelSharing::kAllLengths);
  }
  void make(Sdpa::KernelSharing sharing) {
    auto made = Sdpa::create(sharing);
    if (!made) GTEST_SKIP() << made.error().to_string();
    sdpa_ = std::move(made).value();
  }

  // The answer, and a check that nothing past it was written.
  std::vector<uint16_t> run(const PrefillCase& given) {
    const PrefillSizes& sizes = given.sizes;
    const int64_t guard = static_cast<int64_t>(sizes.num_q_heads) * sizes.head_dim;
    const DeviceArray<uint16_t> queries(given.queries), rows(given.rows);
    const DeviceArray<uint16_t> out(sizes.query_elements() + guard);
    attend(params_of(sizes, queries.data(), rows.data(), out.data()));
    std::vector<uint16_t> result = out.download();
    for (int64_t i = sizes.query_elements(); i < std::ssize(result); ++i) {
      EXPECT_EQ(result[static_cast<size_t>(i)], 0xCBCB) << "written past the end, at " << i;
      if (HasFailure()) break;
    }
    result.resize(static_cast<size_t>(sizes.query_elements()));
    return result;
  }

  void attend(const PrefillAttention& params) {
    const auto bytes = sdpa_->workspace_bytes(params);
    ASSERT_TRUE(bytes) << bytes.error().to_string();
    const DeviceArray<std::byte> workspace(*bytes);
    const Status status = sdpa_->attention(params, workspace.data(), nullptr);
    ASSERT_TRUE(status) << status.error().to_string();
    CLO_CUDA(cudaDeviceSynchronize());
  }

  std::unique_ptr<Sdpa> sdpa_;
};

using HeadsAndDim = std::tuple<std::pair<int32_t, int32_t>, int32_t>;

std::string name_of(const ::testing::TestParamInfo<HeadsAndDim>& info) {
  const auto& [heads, head_dim] = info.param;
  return "q" + std::to_string(heads.first) + "_kv" + std::to_string(heads.second) + "_dim" +
         std::to_string(head_dim);
}

class SdpaShapes : public SdpaTest, public ::testing::WithParamInterface<HeadsAndDim> {};

// One Sdpa for all lengths of a model, as in the engine: the plans share their kernels, and there
// are more of them than are kept.
TEST_P(SdpaShapes, MatchesFloat64) {
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
      const std::vector<uint16_t> out = run(given);
      ASSERT_FALSE(HasFailure());
      const OutputError error = output_error(given.sizes.type, out, reference_attention(given));
      ASSERT_LT(error.relative_l2, kMaxRelativeL2);
      ASSERT_LT(error.max_abs, kMaxAbsolute);
    }
  }
}

// Compiling takes a second per shape and mask, so head_dim 64 is tried with few head counts.
INSTANTIATE_TEST_SUITE_P(Shapes, SdpaShapes,
                         ::testing::Values(HeadsAndDim{{1, 1}, 128}, HeadsAndDim{{4, 2}, 128},
                                           HeadsAndDim{{8, 1}, 128}, HeadsAndDim{{7, 1}, 128},
                                           HeadsAndDim{{6, 2}, 128}, HeadsAndDim{{32, 8}, 128},
                                           HeadsAndDim{{7, 1}, 64}, HeadsAndDim{{32, 8}, 64}),
                         name_of);

TEST_F(SdpaTest, KernelsOfOneShapeMatchFloat64) {
  make(Sdpa::KernelSharing::kNone);
  for (const auto& [first_token, num_tokens] :
       {std::pair<int64_t, int64_t>{0, 129}, {1000, 65}, {63, 1}}) {
    SCOPED_TRACE(first_token);
    const PrefillCase given = make_prefill_case({.num_q_heads = 32,
                                                 .num_kv_heads = 8,
                                                 .first_token = first_token,
                                                 .num_tokens = num_tokens,
                                                 .layer_capacity = 1200},
                                                5);
    EXPECT_LT(output_error(given.sizes.type, run(given), reference_attention(given)).max_abs,
              kMaxAbsolute);
  }
}

// Plans of several models in one Sdpa do not take each other's kernels.
TEST_F(SdpaTest, HeadDimensionsDoNotMix) {
  for (const int32_t head_dim : {128, 64, 128}) {
    SCOPED_TRACE(head_dim);
    const PrefillCase given = make_prefill_case({.num_q_heads = 4,
                                                 .num_kv_heads = 2,
                                                 .head_dim = head_dim,
                                                 .num_tokens = 200,
                                                 .layer_capacity = 256},
                                                9);
    EXPECT_LT(output_error(given.sizes.type, run(given), reference_attention(given)).max_abs,
              kMaxAbsolute);
  }
}

// Huge keys and values in later tokens of the same chunk leave earlier queries alone.
TEST_F(SdpaTest, LaterTokensDoNotReachEarlierQueries) {
  PrefillCase given = make_prefill_case({.num_q_heads = 8,
                                         .num_kv_heads = 2,
                                         .first_token = 45,
                                         .num_tokens = 300,
                                         .layer_capacity = 400},
                                        11);
  const PrefillSizes& sizes = given.sizes;
  const std::vector<double> expected = reference_attention(given);
  constexpr int64_t kLastClean = 100;
  for (int32_t head = 0; head < sizes.num_kv_heads; ++head) {
    for (int64_t t = sizes.first_token + kLastClean + 1; t < sizes.end_token(); ++t) {
      std::fill_n(given.row(head, t), sizes.head_dim, f32_to_bf16(100.0f));
      std::fill_n(given.row(head, t) + sizes.head_dim, sizes.head_dim, f32_to_bf16(1e30f));
    }
  }
  const std::vector<uint16_t> out = run(given);
  const auto kept = static_cast<size_t>((kLastClean + 1) * sizes.num_q_heads * sizes.head_dim);
  EXPECT_LT(output_error(given.sizes.type, out, std::span(expected).first(kept)).max_abs,
            kMaxAbsolute);
}

// The last head starts past 2^31 elements and 2^32 bytes.
TEST_F(SdpaTest, OffsetsAre64Bit) {
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
  attend(params_of(sizes, queries.data(), rows.data(), out.data()));
  EXPECT_LT(output_error(given.sizes.type, out.download(), reference_attention(given)).max_abs,
            kMaxAbsolute);
}

TEST_F(SdpaTest, Speed) {
  if (std::getenv("CLO_BENCH") == nullptr) GTEST_SKIP() << "CLO_BENCH is not set";
  struct Length {
    int64_t first_token, num_tokens;
  };
  for (const auto sharing : {Sdpa::KernelSharing::kAllLengths, Sdpa::KernelSharing::kNone}) {
    make(sharing);
    for (const Length length : {Length{0, 8192}, Length{0, 32768}, Length{0, 131072},
                                Length{0, 131071}, Length{122880, 8192}, Length{122880, 8191}}) {
      const PrefillSizes sizes{.num_q_heads = 32,
                               .num_kv_heads = 8,
                               .head_dim = 128,
                               .first_token = length.first_token,
                               .num_tokens = length.num_tokens,
                               .layer_capacity = 131072};
      const std::vector<uint16_t> noise = to_bits(DType::kBF16, random_floats(1 << 20, 3));
      const DeviceArray<uint16_t> queries(sizes.query_elements()), out(sizes.query_elements());
      const DeviceArray<uint16_t> rows(sizes.num_kv_heads * sizes.head_elements());
      for (const auto* array : {&queries, &rows}) {
        for (int64_t at = 0; at < array->size(); at += 1 << 20) {
          CLO_CUDA(
              cudaMemcpy(array->data() + at, noise.data(),
                         static_cast<size_t>(std::min<int64_t>(1 << 20, array->size() - at)) * 2,
                         cudaMemcpyHostToDevice));
        }
      }
      const PrefillAttention params = params_of(sizes, queries.data(), rows.data(), out.data());
      const auto before = std::chrono::steady_clock::now();
      const auto bytes = sdpa_->workspace_bytes(params);
      const std::chrono::duration<double, std::milli> build =
          std::chrono::steady_clock::now() - before;
      ASSERT_TRUE(bytes) << bytes.error().to_string();
      const DeviceArray<std::byte> workspace(*bytes);
      const auto attend_once = [&] {
        const Status status = sdpa_->attention(params, workspace.data(), nullptr);
        ASSERT_TRUE(status) << status.error().to_string();
      };
      cudaEvent_t start, stop;
      CLO_CUDA(cudaEventCreate(&start));
      CLO_CUDA(cudaEventCreate(&stop));
      attend_once();
      constexpr int kRepeats = 3;
      CLO_CUDA(cudaEventRecord(start));
      for (int i = 0; i < kRepeats; ++i) attend_once();
      CLO_CUDA(cudaEventRecord(stop));
      CLO_CUDA(cudaEventSynchronize(stop));
      float ms = 0;
      CLO_CUDA(cudaEventElapsedTime(&ms, start, stop));
      CLO_CUDA(cudaEventDestroy(start));
      CLO_CUDA(cudaEventDestroy(stop));
      ms /= kRepeats;
      std::printf(
          "%s, kernels for %s: first_token %ld, num_tokens %ld: %.2f ms, %.0f TFLOP/s; plan built "
          "in %.0f ms, workspace %ld bytes\n",
          sdpa_->version().c_str(),
          sharing == Sdpa::KernelSharing::kAllLengths ? "all lengths" : "one shape",
          static_cast<long>(length.first_token), static_cast<long>(length.num_tokens),
          static_cast<double>(ms), prefill_attention_flops(params) / ms * 1e-9, build.count(),
          static_cast<long>(*bytes));
    }
  }
}

}  // namespace
}  // namespace clo::kernels
