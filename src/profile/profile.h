#pragma once
// What is measured of a model's heads. docs/profile.md defines every figure.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "attention/kv_system.h"
#include "profile/head_statistics.h"
#include "tensor/view.h"

namespace clo {

// Thresholds that the reuse rule is tried with: eta and importance exponent, every pair of them.
inline constexpr std::array<double, 6> kTriedEtas = {0.7, 0.8, 0.85, 0.9, 0.95, 0.98};
inline constexpr std::array<double, 5> kTriedExponents = {0.01, 0.1, 0.25, 0.5, 1};
inline constexpr int64_t kNumTrials =
    static_cast<int64_t>(kTriedEtas.size() * kTriedExponents.size());

// L layers, Q query heads, H KV heads. Empty vectors: not measured.
struct HeadStatistics {
  std::vector<float> cosine;            // [L, Q, kMaxLag, kNumSpread] after the rotation
  std::vector<float> cosine_unrotated;  // [L, Q, kMaxLag, kNumSpread] before it
  std::vector<float> mass_outside;      // [L, Q] softmax weight on neither sink nor recent
  std::vector<float> entropy;           // [L, Q] nats
  std::vector<float> modes;             // [L, Q]
  std::vector<float> overlap;           // [L, H] Jaccard index of adjacent exact sets
  std::vector<float> new_on_miss;       // [L, H] under the default policy
  std::vector<float> trial_hit_rate;    // [L, H, etas, exponents]
  std::vector<float> trial_set_loss;    // [L, H, etas, exponents]
  std::vector<float> trial_fetched;     // [L, H, etas, exponents]
  std::vector<float> recall_random;     // [L, H] of the exact set, held out
  std::vector<float> recall_trained;    // [L, H] with the weights that are kept
  std::vector<float> recall_products;   // [L, H] of exact products summed over the group
  std::vector<float> weight_random;     // [L, H] the same, shares of the exact set's weight
  std::vector<float> weight_trained;    // [L, H]
  std::vector<float> weight_products;   // [L, H]

  bool measured() const { return !overlap.empty(); }
};

struct Profile {
  HeadProfile heads;
  HeadStatistics statistics;
  int32_t code_bits = 0;                     // of heads.hash_weights; 0: none
  std::map<std::string, std::string> facts;  // what it was made from: the file's metadata
};

// The tensors of a profile by name, for whoever reads or writes all of them.
struct ProfileField {
  const char* name;
  std::vector<float>* values;
  Shape shape;
};
// Whether it is there only where hashes were trained.
bool is_of_hash(const ProfileField& field);
std::vector<ProfileField> statistics_fields(HeadStatistics& statistics, const KvShape& shape);

}  // namespace clo
