// The memory plan against what a run really takes: each row within 10 % at 1K, 8K and 32K.
#include <unistd.h>

#include <fstream>

#include "engine/memory.h"
#include "loaded_engine.h"
#include "text/tokenizer.h"

namespace clo {
namespace {

int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t row(const MemoryPlan& plan, const std::string& name) {
  for (const PlanRow& candidate : plan.rows) {
    if (candidate.name == name) return candidate.bytes;
  }
  ADD_FAILURE() << "no row " << name;
  return 0;
}

void expect_close(int64_t planned, int64_t measured, const std::string& what) {
  // Absolute slack for rows that are nearly nothing: one page of tokens.
  const double slack = std::max(0.1 * static_cast<double>(measured), 1.1 * (1 << 20));
  EXPECT_NEAR(static_cast<double>(planned), static_cast<double>(measured), slack) << what;
}

class PlanRows : public testing::TestWithParam<std::tuple<int64_t, const char*, KvType>> {};

TEST_P(PlanRows, AreWithinTenPercentOfMeasured) {
  const auto [context, preset_name, kv_type] = GetParam();
  EngineOptions options = tiny_options("recall-7m");
  options.guard_host_rows = false;
  options.prefill_chunk = 512;
  options.max_batch = 1;
  options.max_context_tokens = context;
  options.policy = *preset(preset_name);
  options.kv_type = kv_type;
  const auto config = load_model_config(options.model_dir);
  ASSERT_TRUE(config);

  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  const auto input = plan_input(*config, options);
  ASSERT_TRUE(input);
  const MemoryPlan plan = sketch_memory(*input);
  const Engine::MemoryUse loaded = engine->memory();
  EXPECT_EQ(row(plan, "weights") + row(plan, "workspace"), loaded.device_used_bytes);

  // The rows are reserved whole at admission and written as tokens come, so one step of prefill
  // is enough to see the reservation.
  auto ids = random_ids(context - 8, 4000, 1);
  const RequestId id = *engine->submit(ids_request(std::move(ids), 8, options.policy));
  engine->step();
  const Engine::MemoryUse running = engine->memory();
  expect_close(plan.device_bytes, running.device_used_bytes, "device total");
  expect_close(plan.host_bytes, running.host_used_bytes, "host store");
  engine->cancel(id);
  const auto report = engine->take(id)->report;
  expect_close(row(plan, "key codes") + row(plan, "head caches") + row(plan, "dense layers") +
                   row(plan, "persistent heads"),
               report.device_kv_bytes, "codes and head caches");
  expect_close(row(plan, "host store"), report.host_kv_bytes, "pages of the request");
}

std::string plan_case_name(
    const testing::TestParamInfo<std::tuple<int64_t, const char*, KvType>>& instance) {
  const auto& [context, preset_name, kv_type] = instance.param;
  std::string name = std::string(preset_name) + "_" + std::to_string(context);
  if (kv_type != KvType::kAuto) name += kv_type == KvType::kInt8 ? "_int8" : "_fp8";
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Contexts, PlanRows,
                         testing::Combine(testing::Values(1024, 8192, 32768),
                                          testing::Values("dense", "default", "clo-paper", "hata"),
                                          testing::Values(KvType::kAuto)),
                         plan_case_name);
INSTANTIATE_TEST_SUITE_P(Compressed, PlanRows,
                         testing::Combine(testing::Values(8192, 32768),
                                          testing::Values("dense", "default"),
                                          testing::Values(KvType::kInt8, KvType::kFp8)),
                         plan_case_name);

// Each in a process of its own (see this folder's CMakeLists): memory that an earlier engine gave
// back would be counted otherwise.
class ProcessMemory : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Contexts, ProcessMemory, testing::Values(1024, 8192, 32768),
                         testing::PrintToStringParamName());

TEST_P(ProcessMemory, IsWithinTenPercentOfThePlan) {
  const int64_t context = GetParam();
  EngineOptions options = tiny_options("recall-7m");
  options.guard_host_rows = false;
  options.prefill_chunk = 512;
  options.max_batch = 1;
  options.max_context_tokens = context;
  const auto config = load_model_config(options.model_dir);
  ASSERT_TRUE(config);
  // As `clo inspect` does: the plan counts what the process holds by then, tokenizer included.
  const auto tokenizer = Tokenizer::load(options.model_dir);
  ASSERT_TRUE(tokenizer);
  const auto input = plan_input(*config, options);
  ASSERT_TRUE(input);
  const MemoryPlan plan = sketch_memory(*input);
  const auto engine = load_engine(options);
  ASSERT_NE(engine, nullptr);
  answer_of(*engine, ids_request(random_ids(context - 8, 4000, 1), 8, *preset("default")));
  const int64_t planned = plan.device_bytes + plan.host_bytes + row(plan, "process overhead");
  const Engine::MemoryUse use = engine->memory();
  SCOPED_TRACE(testing::Message() << "device " << plan.device_bytes << " / "
                                  << use.device_peak_bytes << ", host " << plan.host_bytes << " / "
                                  << use.host_used_bytes);
  EXPECT_NEAR(static_cast<double>(planned), static_cast<double>(resident_bytes()),
              0.1 * static_cast<double>(resident_bytes()));
}

}  // namespace
}  // namespace clo
