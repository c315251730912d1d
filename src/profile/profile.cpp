#include "profile/profile.h"

#include <string_view>

namespace clo {

bool is_of_hash(const ProfileField& field) {
  const std::string_view name = field.name;
  return name.starts_with("recall_") || name.starts_with("weight_");
}

std::vector<ProfileField> statistics_fields(HeadStatistics& s, const KvShape& shape) {
  const int64_t layers = shape.num_layers, queries = shape.num_q_heads, heads = shape.num_kv_heads;
  const Shape lags = {layers, queries, kMaxLag, kNumSpread};
  const Shape trials = {layers, heads, std::ssize(kTriedEtas), std::ssize(kTriedExponents)};
  return {{"query_cosine", &s.cosine, lags},
          {"query_cosine_unrotated", &s.cosine_unrotated, lags},
          {"mass_outside", &s.mass_outside, {layers, queries}},
          {"entropy", &s.entropy, {layers, queries}},
          {"modes", &s.modes, {layers, queries}},
          {"set_overlap", &s.overlap, {layers, heads}},
          {"new_rows_on_a_miss", &s.new_on_miss, {layers, heads}},
          {"trial_hit_rate", &s.trial_hit_rate, trials},
          {"trial_set_loss", &s.trial_set_loss, trials},
          {"trial_fetched", &s.trial_fetched, trials},
          {"recall_random", &s.recall_random, {layers, heads}},
          {"recall_trained", &s.recall_trained, {layers, heads}},
          {"recall_products", &s.recall_products, {layers, heads}},
          {"weight_random", &s.weight_random, {layers, heads}},
          {"weight_trained", &s.weight_trained, {layers, heads}},
          {"weight_products", &s.weight_products, {layers, heads}}};
}

}  // namespace clo
