#pragma once
// Which heads keep all their rows on the device. Pure.
#include <cstdint>
#include <span>
#include <vector>

#include "clo/policy.h"
#include "ops/kv_layout.h"

namespace clo {

// resident[layer * num_kv_heads + head]: 1 where the head keeps all rows. Dense layers come on
// top. `difficulty` [num_layers * num_kv_heads] orders the heads that fill a budget, hardest to
// reuse first; empty: layer, head order. `budget_heads` is how many the plan has room for.
// Fails: kBadFlag when a listed head does not exist, or more heads per layer are asked for than
// there are.
Result<std::vector<uint8_t>> choose_resident_heads(const PolicyOptions& policy,
                                                   const KvShape& shape,
                                                   std::span<const float> difficulty,
                                                   int64_t budget_heads);

// Number of (layer, KV head) pairs in dense layers.
int64_t num_dense_heads(const PolicyOptions& policy, const KvShape& shape);
// Whether some head's set is chosen by codes: a sequence needs them on the device then, and not
// otherwise.
bool reads_codes(const PolicyOptions& policy, const KvShape& shape);
// Number that a policy keeps persistent by itself, the budget aside.
int64_t num_fixed_persistent_heads(const PolicyOptions& policy, const KvShape& shape);

}  // namespace clo
