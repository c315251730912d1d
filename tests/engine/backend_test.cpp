// What a policy becomes on a backend.
#include "engine/backend.h"

#include <gtest/gtest.h>

#include <cmath>

#include "clo/report.h"
#include "engine/checks.h"
#include "engine/memory.h"

namespace clo {
namespace {

TEST(ForBackend, PredictsOnlyWhereATransferCanHide) {
  const PolicyOptions automatic = preset("default").value();
  const PolicyOptions cpu = for_backend(automatic, Backend::kCpu);
  EXPECT_EQ(cpu.predict, Predict::kNone);
  EXPECT_EQ(cpu.correction, Correction::kNone);
  const PolicyOptions cuda = for_backend(automatic, Backend::kCuda);
  EXPECT_EQ(cuda.predict, Predict::kPreviousStep);
  EXPECT_EQ(cuda.correction, Correction::kTrueQuery);
}

TEST(ForBackend, PredictsNothingWhereEveryQueryChooses) {
  for (const char* name : {"hata", "dense"}) {
    const PolicyOptions policy = for_backend(preset(name).value(), Backend::kCuda);
    EXPECT_EQ(policy.predict, Predict::kNone) << name;
    EXPECT_EQ(policy.correction, Correction::kNone) << name;
  }
}

TEST(ForBackend, LeavesWhatWasAskedFor) {
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    PolicyOptions asked = preset("clo-paper").value();
    EXPECT_EQ(for_backend(asked, backend).predict, Predict::kPreviousLayer);
    EXPECT_EQ(for_backend(asked, backend).correction, Correction::kNone);
    asked.predict = Predict::kPreviousStep;
    asked.correction = Correction::kAuto;
    EXPECT_EQ(for_backend(asked, backend).correction, Correction::kNone);
  }
  PolicyOptions uncorrected = preset("default").value();
  uncorrected.correction = Correction::kNone;
  EXPECT_EQ(for_backend(uncorrected, Backend::kCuda).predict, Predict::kPreviousStep);
  EXPECT_EQ(for_backend(uncorrected, Backend::kCuda).correction, Correction::kNone);
}

TEST(CheckBackendHas, RefusesWhatTheCpuAloneHasByName) {
  Request watched, masked;
  watched.watched_ranges = {{0, 1}};
  masked.masked_ranges = {{0, 1}};
  EXPECT_TRUE(check_backend_has(watched, Backend::kCuda));
  EXPECT_TRUE(check_backend_has(masked, Backend::kCpu));
  const Status refused = check_backend_has(masked, Backend::kCuda);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(refused.error().where, "masked_ranges");
  EXPECT_NE(refused.error().message.find("--backend cpu"), std::string::npos);
}

TEST(CheckDeviceRows, RefusesWhatIsNotTheModelsTypeByName) {
  KvShape shape;
  shape.type = DType::kBF16;
  EXPECT_TRUE(check_device_rows(shape, DType::kBF16));
  const auto expect_refused = [&](const char* name) {
    const Status refused = check_device_rows(shape, DType::kBF16);
    ASSERT_FALSE(refused) << name;
    EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(refused.error().where, "--kv-type");
    for (const char* part : {name, "bf16", "--backend cpu"}) {
      EXPECT_NE(refused.error().message.find(part), std::string::npos) << part;
    }
  };
  shape.type = DType::kF16;
  expect_refused("f16");
  shape.type = DType::kF32;
  expect_refused("f32");
  // Compressed rows of any kind, as long as those that stay full are of the model's type.
  shape.type = DType::kBF16;
  for (const RowFormat stored : {RowFormat::kInt8, RowFormat::kFp8}) {
    shape.stored = stored;
    EXPECT_TRUE(check_device_rows(shape, DType::kBF16));
  }
}

TEST(KvShapeOf, TheKvTypeIsOfRowsAloneAndTheTypeOfProducts) {
  ModelConfig config;
  config.num_q_heads = config.num_kv_heads = config.num_layers = 1;
  config.head_dim = 64;
  config.dtype = DType::kF16;
  EngineOptions options;
  const auto expect = [&](KvType kv_type, WeightType dtype, DType row, RowFormat stored,
                          DType product) {
    options.kv_type = kv_type;
    options.dtype = dtype;
    const KvShape shape = kv_shape(config, options);
    EXPECT_EQ(shape.type, row);
    EXPECT_EQ(shape.stored, stored);
    EXPECT_EQ(model_type(config, options), product);
  };
  using enum RowFormat;
  expect(KvType::kAuto, WeightType::kAuto, DType::kF16, kFull, DType::kF16);
  expect(KvType::kAuto, WeightType::kBF16, DType::kBF16, kFull, DType::kBF16);
  expect(KvType::kF32, WeightType::kAuto, DType::kF32, kFull, DType::kF16);
  expect(KvType::kBF16, WeightType::kF32, DType::kBF16, kFull, DType::kF32);
  expect(KvType::kF16, WeightType::kBF16, DType::kF16, kFull, DType::kBF16);
  expect(KvType::kInt8, WeightType::kAuto, DType::kF16, kInt8, DType::kF16);
  expect(KvType::kFp8, WeightType::kF32, DType::kF32, kFp8, DType::kF32);
}

TEST(PolicyOptions, AMarginIsAShare) {
  PolicyOptions policy;
  policy.predict = Predict::kPreviousStep;
  policy.correction = Correction::kTrueQuery;
  for (const double margin : {0.0, 0.5, 1.0}) {
    policy.prefetch_margin = margin;
    EXPECT_TRUE(validate(policy)) << margin;
  }
  EXPECT_NE(describe(policy).find("--prefetch-margin 1"), std::string::npos);
  for (const double margin : {-0.1, 1.1, std::nan("")}) {
    policy.prefetch_margin = margin;
    const Status status = validate(policy);
    ASSERT_FALSE(status) << margin;
    EXPECT_EQ(status.error().where, "--prefetch-margin");
  }
}

TEST(KvCounters, ACorrectedSetWasNotKept) {
  KvCounters counters;
  EXPECT_EQ(counters.hit_rate(), 0);
  counters.hits = 6;
  counters.misses = 2;
  counters.aged = 1;
  counters.incomplete = 1;
  EXPECT_EQ(counters.hit_rate(), 0.6);
  counters.corrections = 2;
  EXPECT_EQ(counters.hit_rate(), 0.4);
  counters.corrections = 8;  // missed ahead, and refuted as well
  EXPECT_EQ(counters.hit_rate(), 0);
}

}  // namespace
}  // namespace clo
