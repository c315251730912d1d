#include "reuse/persistent_heads.h"

#include <algorithm>
#include <numeric>

namespace clo {

namespace {

int32_t num_dense_layers(const PolicyOptions& policy, const KvShape& shape) {
  if (policy.select == Select::kNone || policy.dense_layers < 0) return shape.num_layers;
  return std::min(policy.dense_layers, shape.num_layers);
}

}  // namespace

int64_t num_dense_heads(const PolicyOptions& policy, const KvShape& shape) {
  return int64_t{num_dense_layers(policy, shape)} * shape.num_kv_heads;
}

bool reads_codes(const PolicyOptions& policy, const KvShape& shape) {
  return selects_by_code(policy.select) && shape.code_bits > 0 &&
         num_dense_layers(policy, shape) < shape.num_layers;
}

int64_t num_fixed_persistent_heads(const PolicyOptions& policy, const KvShape& shape) {
  const auto chosen = choose_resident_heads(policy, shape, {}, 0);
  if (!chosen) return 0;
  return std::count(chosen->begin(), chosen->end(), 1) - num_dense_heads(policy, shape);
}

Result<std::vector<uint8_t>> choose_resident_heads(const PolicyOptions& policy,
                                                   const KvShape& shape,
                                                   std::span<const float> difficulty,
                                                   int64_t budget_heads) {
  const int32_t heads = shape.num_kv_heads;
  std::vector<uint8_t> resident(static_cast<size_t>(shape.num_layers) * heads, 0);
  const int32_t dense_layers = num_dense_layers(policy, shape);
  std::fill_n(resident.begin(), static_cast<size_t>(dense_layers) * heads, 1);

  // Hardest first; a stable sort keeps layer, head order among equals and without a profile.
  std::vector<size_t> order(resident.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (difficulty.size() == resident.size()) {
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return difficulty[a] > difficulty[b]; });
  }
  switch (policy.persistent) {
    case PolicyOptions::Persistent::kAll:
      std::fill(resident.begin(), resident.end(), 1);
      break;
    case PolicyOptions::Persistent::kPerLayer: {
      if (policy.persistent_per_layer > heads) {
        return Error{ErrorCode::kBadFlag,
                     "expected at most " + std::to_string(heads) +
                         ", the model's KV heads per layer, or all; found " +
                         std::to_string(policy.persistent_per_layer),
                     "--persistent-heads"};
      }
      std::vector<int32_t> taken(static_cast<size_t>(shape.num_layers), 0);
      for (const size_t i : order) {
        if (resident[i] || taken[i / heads] >= policy.persistent_per_layer) continue;
        resident[i] = 1;
        ++taken[i / heads];
      }
      break;
    }
    case PolicyOptions::Persistent::kList:
      for (const auto& [layer, head] : policy.persistent_heads) {
        if (layer < 0 || layer >= shape.num_layers || head < 0 || head >= heads) {
          return Error{ErrorCode::kBadFlag,
                       "head " + std::to_string(layer) + ":" + std::to_string(head) +
                           " does not exist; the model has layers 0 to " +
                           std::to_string(shape.num_layers - 1) + " with KV heads 0 to " +
                           std::to_string(heads - 1),
                       "--persistent-heads"};
        }
        resident[static_cast<size_t>(layer) * heads + head] = 1;
      }
      break;
    case PolicyOptions::Persistent::kFillBudget: {
      for (const size_t i : order) {
        if (budget_heads <= 0) break;
        if (resident[i]) continue;
        resident[i] = 1;
        --budget_heads;
      }
      break;
    }
  }
  return resident;
}

}  // namespace clo
