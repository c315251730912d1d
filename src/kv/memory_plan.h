#pragma once
// The memory plan: what every part of a run will occupy, worked out before anything is allocated,
// in one table with the flag that changes each row. Pure arithmetic.
#include <cstdint>
#include <string>
#include <vector>

#include "clo/result.h"
#include "kv/head_cache.h"
#include "ops/kv_layout.h"

namespace clo {

struct PlanInput {
  KvShape shape;
  int64_t context_tokens = 0;  // per sequence, prompt and answer
  int64_t batch = 1;
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
  int32_t sink_tokens = 0;
  int32_t ring_tokens = 0;
  int32_t slot_capacity = 0;
  int64_t num_dense_heads = 0;       // (layer, KV head) pairs that dense layers keep resident
  int64_t num_persistent_heads = 0;  // resident by choice
  bool fill_budget = false;          // as many persistent heads as the device budget allows
  bool host_copy = true;             // pages are kept for others: all heads' rows, and codes
  bool device_codes = true;          // some set is chosen by codes
  int64_t device_budget_bytes = 0;   // 0: as much as the plan needs
  int64_t host_budget_bytes = 0;     // 0: as much as the plan needs
  int64_t process_overhead_bytes = 0;
  int64_t device_overhead_bytes = 0;  // a GPU's context, code and libraries; 0 on the CPU
};

struct PlanRow {
  std::string name;
  std::string place;  // "device", "host" or "process"
  int64_t bytes = 0;
  std::string flag;  // what to change to make it smaller
};

struct MemoryPlan {
  std::vector<PlanRow> rows;
  int64_t device_bytes = 0;
  int64_t host_bytes = 0;
  int64_t num_resident_heads = 0;    // dense and persistent
  int64_t num_persistent_heads = 0;  // after filling the budget
  int64_t device_budget_bytes = 0;
  int64_t host_budget_bytes = 0;
};

// Fails: kDeviceMemory or kHostMemory when a given budget is too small for the batch; the message
// names the smallest budget that works and the flags that lower it.
Result<MemoryPlan> plan_memory(const PlanInput& input);
// The same figures without judging them against the budgets (persistent heads still fill what is
// left of a device budget that is large enough).
MemoryPlan sketch_memory(const PlanInput& input);

// Host memory this process may use: the smallest of physical memory and the cgroup v1 and v2
// limits that apply, less what is in use under that limit.
int64_t available_host_bytes();

}  // namespace clo
