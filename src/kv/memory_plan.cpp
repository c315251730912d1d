#include "kv/memory_plan.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "base/units.h"

namespace clo {

namespace {

struct HeadBytes {
  int64_t evictable = 0;
  int64_t resident = 0;
};

HeadBytes head_bytes(const PlanInput& input) {
  HeadCacheSpec spec{input.sink_tokens, input.ring_tokens, input.slot_capacity,
                     input.context_tokens, false};
  HeadBytes bytes;
  bytes.evictable = head_cache_bytes(input.shape, spec);
  spec.resident = true;
  bytes.resident = head_cache_bytes(input.shape, spec);
  return bytes;
}

std::optional<int64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

// Limit less use of the cgroups from `path` up to the root of the hierarchy mounted at `mount`.
int64_t cgroup_headroom(const std::string& mount, std::string path, const char* limit_file,
                        const char* usage_file) {
  int64_t headroom = std::numeric_limits<int64_t>::max();
  while (true) {
    const std::string folder = mount + path + (path.ends_with('/') ? "" : "/");
    const auto limit = read_number(folder + limit_file);
    const auto usage = read_number(folder + usage_file);
    // Version 1 writes a number near 2^63 for "no limit".
    if (limit && usage && *limit < (int64_t{1} << 60)) {
      headroom = std::min(headroom, std::max<int64_t>(0, *limit - *usage));
    }
    if (path.empty() || path == "/") return headroom;
    const size_t slash = path.find_last_of('/');
    path = slash == std::string::npos ? "" : path.substr(0, slash);
  }
}

}  // namespace

MemoryPlan sketch_memory(const PlanInput& input) {
  const KvShape& shape = input.shape;
  const int64_t all_heads = int64_t{shape.num_layers} * shape.num_kv_heads;
  const HeadBytes head = head_bytes(input);
  const int64_t pages = divide_up(input.context_tokens, kPageTokens) * input.batch;
  // On the device for all heads when any head's set is chosen by them; in the host store when a
  // later sequence, which may choose by them, can share the page.
  const int64_t all_codes = pages * kPageTokens * shape.token_code_bytes();
  const int64_t codes = input.device_codes ? all_codes : 0;
  const int64_t fixed =
      input.weight_bytes + input.workspace_bytes + codes + input.device_overhead_bytes;

  int64_t persistent = std::min(input.num_persistent_heads, all_heads - input.num_dense_heads);
  if (input.fill_budget && input.device_budget_bytes > 0) {
    const int64_t base =
        fixed + input.batch * (input.num_dense_heads * head.resident +
                               (all_heads - input.num_dense_heads) * head.evictable);
    const int64_t extra = input.batch * (head.resident - head.evictable);
    const int64_t left = input.device_budget_bytes - base;
    const int64_t fit = left <= 0 ? 0 : (extra <= 0 ? all_heads : left / extra);
    persistent = std::clamp(fit, persistent, all_heads - input.num_dense_heads);
  }

  MemoryPlan plan;
  plan.num_persistent_heads = persistent;
  plan.num_resident_heads = persistent + input.num_dense_heads;
  plan.device_budget_bytes = input.device_budget_bytes;
  plan.host_budget_bytes = input.host_budget_bytes;
  const int64_t evictable = all_heads - plan.num_resident_heads;
  const bool host_pages = input.host_copy || evictable > 0;
  const auto add = [&](const char* name, const char* place, int64_t bytes, const char* flag) {
    plan.rows.push_back({name, place, bytes, flag});
    if (plan.rows.back().place == "device") plan.device_bytes += bytes;
    if (plan.rows.back().place == "host") plan.host_bytes += bytes;
  };
  add("weights", "device", input.weight_bytes, "--dtype");
  add("workspace", "device", input.workspace_bytes, "--prefill-chunk, --batch");
  if (input.device_overhead_bytes > 0) {
    add("CUDA context", "device", input.device_overhead_bytes, "(fixed)");
  }
  add("key codes", "device", codes, "--bits");
  add("head caches", "device", input.batch * evictable * head.evictable,
      "--kv-ratio, --set-tokens, --recent, --max-label-age, --kv-type");
  add("dense layers", "device", input.batch * input.num_dense_heads * head.resident,
      "--dense-layers, --kv-type");
  add("persistent heads", "device", input.batch * persistent * head.resident,
      "--persistent-heads, --device-memory, --kv-type");
  add("host store", "host",
      (host_pages ? pages * kPageTokens * shape.token_bytes() : 0) +
          (input.host_copy ? all_codes : 0),
      "--context, --host-memory, --kv-type");
  add("process overhead", "process", input.process_overhead_bytes, "--threads");
  return plan;
}

Result<MemoryPlan> plan_memory(const PlanInput& input) {
  MemoryPlan plan = sketch_memory(input);
  if (input.device_budget_bytes > 0 && plan.device_bytes > input.device_budget_bytes) {
    PlanInput least = input;
    least.fill_budget = false;
    return Error{ErrorCode::kDeviceMemory,
                 "the device budget is " + format_bytes(input.device_budget_bytes) + " (" +
                     std::to_string(input.device_budget_bytes) + " bytes); " +
                     std::to_string(input.batch) + " sequence(s) of " +
                     std::to_string(input.context_tokens) + " tokens need at least " +
                     std::to_string(sketch_memory(least).device_bytes) +
                     " bytes; raise --device-memory, or lower the context, --kv-ratio or "
                     "--prefill-chunk",
                 "--device-memory"};
  }
  if (input.host_budget_bytes > 0 && plan.host_bytes > input.host_budget_bytes) {
    return Error{ErrorCode::kHostMemory,
                 "the host budget is " + format_bytes(input.host_budget_bytes) + "; " +
                     std::to_string(input.batch) + " sequence(s) of " +
                     std::to_string(input.context_tokens) + " tokens need " +
                     std::to_string(plan.host_bytes) +
                     " bytes of system memory; raise --host-memory or lower the context",
                 "--host-memory"};
  }
  return plan;
}

int64_t available_host_bytes() {
  const int64_t page = sysconf(_SC_PAGESIZE);
  int64_t available = sysconf(_SC_PHYS_PAGES) * page;
  // MemTotal can grow with use on some virtual machines, so free memory is read, not inferred.
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    std::istringstream fields(line);
    std::string name;
    int64_t kib = 0;
    if (fields >> name >> kib && name == "MemAvailable:") available = kib * 1024;
  }
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      available = std::min(available,
                           cgroup_headroom("/sys/fs/cgroup", path, "memory.max", "memory.current"));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      available =
          std::min(available, cgroup_headroom("/sys/fs/cgroup/memory", path,
                                              "memory.limit_in_bytes", "memory.usage_in_bytes"));
    }
  }
  return available;
}

}  // namespace clo
