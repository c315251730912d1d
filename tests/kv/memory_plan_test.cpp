#include "kv/memory_plan.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace clo {
namespace {

PlanInput arbitrary_input() {
  PlanInput input;
  input.shape.num_layers = *rc::gen::inRange(1, 5);
  input.shape.num_kv_heads = *rc::gen::inRange(1, 4);
  input.shape.num_q_heads = input.shape.num_kv_heads * *rc::gen::inRange(1, 5);
  input.shape.head_dim = *rc::gen::element(16, 64, 128);
  input.shape.type = *rc::gen::element(DType::kF32, DType::kBF16);
  input.shape.code_bits = *rc::gen::element(0, 64, 128, 256);
  input.shape.stored = *rc::gen::element(RowFormat::kFull, RowFormat::kInt8, RowFormat::kFp8);
  input.context_tokens = *rc::gen::inRange<int64_t>(1, 20000);
  input.batch = *rc::gen::inRange(1, 5);
  input.weight_bytes = *rc::gen::inRange(0, 1000000);
  input.workspace_bytes = *rc::gen::inRange(0, 1000000);
  input.sink_tokens = *rc::gen::inRange(0, 5);
  input.ring_tokens = *rc::gen::inRange(1, 129);
  input.slot_capacity =
      static_cast<int32_t>(std::min<int64_t>(*rc::gen::inRange(1, 2000), input.context_tokens));
  const int64_t heads = int64_t{input.shape.num_layers} * input.shape.num_kv_heads;
  input.num_dense_heads =
      int64_t{*rc::gen::inRange(0, input.shape.num_layers + 1)} * input.shape.num_kv_heads;
  input.num_persistent_heads = *rc::gen::inRange<int64_t>(0, heads - input.num_dense_heads + 1);
  input.fill_budget = *rc::gen::arbitrary<bool>();
  input.host_copy = *rc::gen::arbitrary<bool>();
  input.device_codes = *rc::gen::arbitrary<bool>();
  return input;
}

int64_t row_bytes(const MemoryPlan& plan, const std::string& name) {
  int64_t bytes = -1;
  for (const PlanRow& row : plan.rows) {
    if (row.name == name) bytes = row.bytes;
  }
  return bytes;
}

RC_GTEST_PROP(MemoryPlan, SumsAreTheSumsOfTheRows, ()) {
  PlanInput input = arbitrary_input();
  input.device_budget_bytes = *rc::gen::inRange<int64_t>(0, 200000000);
  const MemoryPlan plan = sketch_memory(input);
  int64_t device = 0, host = 0;
  for (const PlanRow& row : plan.rows) {
    RC_ASSERT(row.bytes >= 0);
    RC_ASSERT(!row.flag.empty());
    RC_ASSERT(row.place == "device" || row.place == "host" || row.place == "process");
    if (row.place == "device") device += row.bytes;
    if (row.place == "host") host += row.bytes;
  }
  RC_ASSERT(plan.device_bytes == device);
  RC_ASSERT(plan.host_bytes == host);

  // Each row from the layout, by hand.
  const KvShape& shape = input.shape;
  HeadCacheSpec spec{input.sink_tokens, input.ring_tokens, input.slot_capacity,
                     input.context_tokens, false};
  const int64_t evictable = head_cache_bytes(shape, spec);
  spec.resident = true;
  const int64_t resident = head_cache_bytes(shape, spec);
  const int64_t heads = int64_t{shape.num_layers} * shape.num_kv_heads;
  const int64_t tokens = (input.context_tokens + kPageTokens - 1) / kPageTokens * kPageTokens;
  RC_ASSERT(plan.num_resident_heads == plan.num_persistent_heads + input.num_dense_heads);
  RC_ASSERT(plan.num_resident_heads <= heads);
  RC_ASSERT(plan.num_persistent_heads >= input.num_persistent_heads);
  RC_ASSERT(row_bytes(plan, "weights") == input.weight_bytes);
  RC_ASSERT(row_bytes(plan, "workspace") == input.workspace_bytes);
  RC_ASSERT(row_bytes(plan, "head caches") ==
            input.batch * (heads - plan.num_resident_heads) * evictable);
  RC_ASSERT(row_bytes(plan, "dense layers") == input.batch * input.num_dense_heads * resident);
  RC_ASSERT(row_bytes(plan, "persistent heads") ==
            input.batch * plan.num_persistent_heads * resident);
  // Codes: on the device for those who choose by them, in the host store for those who may share.
  const int64_t codes = input.batch * tokens * shape.token_code_bytes();
  RC_ASSERT(row_bytes(plan, "key codes") == (input.device_codes ? codes : 0));
  const bool host_pages = input.host_copy || plan.num_resident_heads < heads;
  RC_ASSERT(row_bytes(plan, "host store") ==
            (host_pages ? input.batch * tokens * shape.token_bytes() : 0) +
                (input.host_copy ? codes : 0));
}

RC_GTEST_PROP(MemoryPlan, ABiggerBudgetNeverHoldsFewerHeads, ()) {
  PlanInput input = arbitrary_input();
  input.fill_budget = true;
  auto budgets = *rc::gen::container<std::vector<int64_t>>(
      rc::gen::inRange<int64_t>(1, *rc::gen::element<int64_t>(1000000, 100000000, 2000000000)));
  std::sort(budgets.begin(), budgets.end());
  int64_t last = 0;
  for (const int64_t budget : budgets) {
    input.device_budget_bytes = budget;
    const MemoryPlan sketch = sketch_memory(input);
    RC_ASSERT(sketch.num_persistent_heads >= last);
    last = sketch.num_persistent_heads;
    // What the plan accepts, it keeps: filling never overshoots the budget.
    const auto plan = plan_memory(input);
    if (plan) RC_ASSERT(plan->device_bytes <= budget);
  }
}

RC_GTEST_PROP(MemoryPlan, FillingLeavesNoRoomForOneMoreHead, ()) {
  PlanInput input = arbitrary_input();
  input.fill_budget = true;
  input.device_budget_bytes = *rc::gen::inRange<int64_t>(1000000, 100000000);
  const auto plan = plan_memory(input);
  RC_PRE(bool{plan});
  const int64_t heads = int64_t{input.shape.num_layers} * input.shape.num_kv_heads;
  if (plan->num_resident_heads == heads) return;
  PlanInput more = input;
  more.fill_budget = false;
  more.num_persistent_heads = plan->num_persistent_heads + 1;
  RC_ASSERT(sketch_memory(more).device_bytes > input.device_budget_bytes);
}

// The number right before " bytes" in a refusal, the last one where there are several.
int64_t number_in(const std::string& message) {
  const size_t end = message.rfind(" bytes");
  RC_ASSERT(end != std::string::npos);
  const size_t begin = message.find_last_not_of("0123456789", end - 1) + 1;
  RC_ASSERT(begin < end);
  return std::stoll(message.substr(begin, end - begin));
}

RC_GTEST_PROP(MemoryPlan, TheDeviceBudgetItNamesWorksAndOneByteLessDoesNot, ()) {
  PlanInput input = arbitrary_input();
  input.device_budget_bytes = *rc::gen::inRange<int64_t>(1, 3000000);
  const auto refused = plan_memory(input);
  RC_PRE(!refused);
  RC_ASSERT(refused.error().code == ErrorCode::kDeviceMemory);
  RC_ASSERT(refused.error().where == "--device-memory");
  RC_ASSERT(refused.error().message.find(std::to_string(input.context_tokens) + " tokens") !=
            std::string::npos);
  input.device_budget_bytes = number_in(refused.error().message);
  RC_ASSERT(bool{plan_memory(input)});
  --input.device_budget_bytes;
  RC_ASSERT(!plan_memory(input));
}

RC_GTEST_PROP(MemoryPlan, TheHostBudgetItNamesWorksAndOneByteLessDoesNot, ()) {
  PlanInput input = arbitrary_input();
  input.host_budget_bytes = *rc::gen::inRange<int64_t>(1, 3000000);
  const auto refused = plan_memory(input);
  RC_PRE(!refused);
  RC_ASSERT(refused.error().code == ErrorCode::kHostMemory);
  RC_ASSERT(refused.error().where == "--host-memory");
  input.host_budget_bytes = number_in(refused.error().message);
  RC_ASSERT(bool{plan_memory(input)});
  --input.host_budget_bytes;
  RC_ASSERT(!plan_memory(input));
}

TEST(MemoryPlan, WithoutBudgetsEverythingIsAccepted) {
  PlanInput input;
  input.shape = {32, 32, 8, 128, DType::kBF16, 128};
  input.context_tokens = 1 << 20;
  input.batch = 64;
  input.slot_capacity = 104896;
  input.ring_tokens = 128;
  const auto plan = plan_memory(input);
  ASSERT_TRUE(plan);
  // 64 sequences of 2^20 tokens of 128 KiB, and 4 KiB of codes each: far beyond 32 bits.
  EXPECT_EQ(plan->host_bytes, (int64_t{64} << 20) * (131072 + 4096));
}

TEST(MemoryPlan, WhenEverythingFitsNothingIsOffloaded) {
  PlanInput input;
  input.shape = {4, 4, 2, 64, DType::kBF16, 128};
  input.context_tokens = 5000;
  input.ring_tokens = 128;
  input.slot_capacity = 512;
  input.fill_budget = true;
  input.host_copy = false;
  input.device_budget_bytes = int64_t{1} << 30;
  const auto plan = plan_memory(input);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->num_resident_heads, 8);
  EXPECT_EQ(plan->host_bytes, 0);
}

TEST(MemoryPlan, AvailableHostBytesAreWithinTheMachine) {
  const int64_t available = available_host_bytes();
  EXPECT_GT(available, 0);
  EXPECT_LE(available, int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
}

}  // namespace
}  // namespace clo
