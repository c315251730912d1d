#pragma once
// Trained projections: a key's code is the signs of k W + b, and W [head_dim, bits] and the bias b
// [bits] are learned for one KV head so that the keys nearest to a query are the exact top-k. And
// how good a projection is: its recall of that set. Both lie in one matrix [head_dim + 1, bits],
// the bias last. docs/profile.md has the recipes and what they reach.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ops/params.h"
#include "profile/head_attention.h"

namespace clo {

// Steps [first_step, end_step) of a window and what exact attention does in them.
struct HeadSample {
  HeadWindow window;
  const HeadAttention* attention = nullptr;
  int64_t first_step = 0, end_step = 0;
};

enum class HashRecipe : uint8_t {
  kPublished,  // HATA's loss on pairs of a query and an earlier key, SGD with momentum
  kBoundary,   // ours: keys on the wrong side of the boundary that the top-k draws, Adam
};

struct HashTraining {
  HashRecipe recipe = HashRecipe::kBoundary;
  int32_t bits = 128;
  int32_t iterations = 1500;  // of kBoundary; the published recipe has its own number
  uint64_t seed = 42;
  std::function<bool()> keep_going;  // false: what kBoundary has so far is returned
};

// The random orthogonal projection as a matrix [head_dim + 1, bits]: no bias, and whole numbers, so
// that bf16 holds it exactly. Its codes are those of the transform but for sums that round across
// zero.
std::vector<float> projection_matrix(const HashParams& hash);

// A trained projection [head_dim + 1, bits], of values that bf16 holds. `start`, as large and
// without a bias, is what kBoundary sets out from. Deterministic by seed and processor. Requires:
// samples with steps and candidates.
std::vector<float> train_hash(const HeadShape& shape, std::span<const HeadSample> samples,
                              const PolicyOptions& policy, std::span<const float> start,
                              const HashTraining& training);

// What a choice of as many tokens as the exact set has finds of it, means over the steps.
struct Recall {
  double tokens = 0;  // share of its tokens
  double weight = 0;  // share of the softmax weight on its tokens
};

// Of the smallest distances as the policy's selection counts them (graded-hash, or hash for every
// other), among equals the lower token.
Recall hash_recall(const HeadShape& shape, std::span<const HeadSample> samples,
                   const PolicyOptions& policy, std::span<const float> weights, int32_t bits);

// Of the largest sums over the group of exact query-key products: what a vote that counts every
// query head alike reaches without any hashing. The exact set sums softmax weights instead.
Recall product_recall(const HeadShape& shape, std::span<const HeadSample> samples,
                      const PolicyOptions& policy);

}  // namespace clo
