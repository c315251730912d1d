// What an observer sees of prompts on the CUDA backend: the keys and queries that the CPU computes.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/loaded_engine.h"
#include "kernels/gpu_test.h"
#include "profile/head_statistics.h"
#include "profile/trace.h"
#include "random_model.h"

namespace clo {
namespace {

class GpuRecording : public kernels::GpuTest {};

constexpr int64_t kTokens = 611, kSteps = 140;

EngineOptions options_for(const std::string& model_dir, Backend backend, int32_t chunk) {
  EngineOptions options;
  options.model_dir = model_dir;
  options.backend = backend;
  options.dtype = WeightType::kBF16;
  options.require_tokenizer = false;
  options.max_context_tokens = 1024;
  options.max_batch = 1;
  options.prefill_chunk = chunk;
  options.keep_prefixes = false;
  return options;
}

WindowTrace record(EngineOptions options, const PolicyOptions& policy) {
  TraceRecorder recorder;
  options.observer = &recorder;
  options.policy = policy;
  const auto engine = load_engine(options);
  if (!engine) return {};
  // Twice: the second window must not hold anything of the first.
  for (const uint64_t seed : {7, 8}) {
    recorder.begin(kTokens, kSteps);
    (void)answer_of(*engine,
                    ids_request(random_ids(kTokens, engine->vocab_size(), seed), 1, policy));
    if (seed == 7) (void)recorder.take();
  }
  return recorder.take();
}

double apart(std::span<const float> a, std::span<const float> b) {
  double difference = 0, square = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (a[i] - b[i]);
    square += double{a[i]} * a[i];
  }
  return std::sqrt(difference / square);
}

void expect_alike(const KvShape& shape, const WindowTrace& a, const WindowTrace& b, double first,
                  double later) {
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
      SCOPED_TRACE(testing::Message() << "layer " << layer << ", head " << head);
      const HeadWindow of_a = a.head(layer, head, 0), of_b = b.head(layer, head, 0);
      ASSERT_EQ(of_a.keys.size(), of_b.keys.size());
      ASSERT_EQ(of_a.queries.size(), of_b.queries.size());
      ASSERT_EQ(of_a.num_tokens, kTokens);
      ASSERT_EQ(of_a.first_context, kTokens - kSteps + 1);
      const double bound = layer == 0 ? first : later;
      EXPECT_LE(apart(of_a.keys, of_b.keys), bound);
      EXPECT_LE(apart(of_a.queries, of_b.queries), bound);
    }
  }
}

KvShape shape_of(int layers, int q_heads, int kv_heads, int dim) {
  return {layers, q_heads, kv_heads, dim, DType::kBF16};
}
// Of kRandomModels.
const KvShape kShapes[] = {shape_of(3, 4, 2, 64), shape_of(3, 7, 1, 128), shape_of(4, 6, 2, 128)};

TEST_F(GpuRecording, KeysAndQueriesAreThoseOfTheCpu) {
  for (int m = 0; m < 3; ++m) {
    SCOPED_TRACE(kRandomModels[m].name);
    const RandomModelDir dir(kRandomModels[m]);
    const PolicyOptions dense = *preset("dense");
    const WindowTrace cpu = record(options_for(dir.path(), Backend::kCpu, 256), dense);
    for (const int32_t chunk : {256, 1024}) {  // in three chunks, the last of odd length, and whole
      SCOPED_TRACE(chunk);
      const WindowTrace gpu = record(options_for(dir.path(), Backend::kCuda, chunk), dense);
      // The GPU rounds what passes between its kernels to bf16.
      expect_alike(kShapes[m], cpu, gpu, 0.01, 0.03);
    }
  }
}

TEST_F(GpuRecording, DoesNotDependOnWhereRowsAreKept) {
  const RandomModelDir dir(kRandomModels[0]);
  EngineOptions options = options_for(dir.path(), Backend::kCuda, 256);
  const WindowTrace dense = record(options, *preset("dense"));
  const WindowTrace offloaded = record(options, evictable("default"));
  expect_alike(kShapes[0], dense, offloaded, 0, 1e-6);
  // Compressed rows are read by the chunks that follow; what is shown are full rows.
  options.kv_type = KvType::kInt8;
  const WindowTrace compressed = record(options, *preset("dense"));
  expect_alike(kShapes[0], dense, compressed, 0, 0.05);
}

TEST_F(GpuRecording, DecodeIsNotObserved) {
  const RandomModelDir dir(kRandomModels[0]);
  EngineOptions options = options_for(dir.path(), Backend::kCuda, 256);
  TraceRecorder recorder(TraceRecorder::Source::kDecode);
  options.observer = &recorder;
  const auto engine = Engine::load(options);
  ASSERT_FALSE(engine);
  EXPECT_EQ(engine.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(engine.error().message.find("--backend cpu"), std::string::npos);
}

}  // namespace
}  // namespace clo
