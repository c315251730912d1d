#include <algorithm>

#include "base/check.h"
#include "base/units.h"
#include "cuda/hash_trainer.h"

namespace clo {

HashTrainerPlan plan_hash_trainer(const HashTrainerShape& shape) {
  CLO_CHECK(shape.width >= 16 && shape.width % 16 == 0, shape.width);
  CLO_CHECK(shape.bits >= 64 && shape.bits % 64 == 0, shape.bits);
  HashTrainerPlan plan;
  for (const HashTrainerShape::Window& window : shape.windows) {
    CLO_CHECK(window.num_keys >= 16 && window.num_steps >= 1, window.num_keys, window.num_steps);
    plan.keys.push_back(plan.head_keys);
    plan.queries.push_back(plan.head_queries);
    plan.labels.push_back(plan.head_labels);
    plan.head_keys += window.num_keys * shape.width;
    plan.head_queries += window.num_steps * shape.width;
    plan.head_labels += window.num_steps * divide_up(window.num_keys, 64);
    plan.most_keys =
        std::max(plan.most_keys, std::min<int64_t>(kMostBatchKeys, window.num_keys / 16 * 16));
  }
  plan.head_weights = int64_t{shape.bits} * shape.width;
  plan.head_codes = (plan.most_keys + kBatchQueries) * shape.bits;
  plan.head_scores = kBatchQueries * plan.most_keys;
  plan.head_bytes = (plan.head_keys + plan.head_queries + 3 * plan.head_weights + plan.head_codes +
                     plan.head_scores) *
                        static_cast<int64_t>(sizeof(float)) +
                    plan.head_labels * static_cast<int64_t>(sizeof(uint64_t));
  return plan;
}

}  // namespace clo
