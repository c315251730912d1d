#include "profile/train_hash.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "profile/boundary_inputs.h"
#include "profile/matrix.h"
#include "profile/train_published.h"
#include "reference/cpu_ops.h"
#include "select/set_rule.h"
#include "tensor/dtype.h"

namespace clo {

std::vector<float> projection_matrix(const HashParams& hash) {
  CLO_CHECK(hash.weights == nullptr);
  std::vector<float> matrix(static_cast<size_t>(hash_weight_count(hash.head_dim, hash.bits)));
  std::vector<float> x(static_cast<size_t>(hash.width));
  for (int32_t d = 0; d < hash.head_dim; ++d) {
    const uint32_t* signs = hash.signs;
    for (int32_t first = 0; first < hash.bits; first += hash.width) {
      std::fill(x.begin(), x.end(), 0.0f);
      x[d] = 1;
      for (int round = 0; round < 2; ++round) {
        simd_table().hadamard(x.data(), signs, hash.width);
        signs += hash.width / 32;
      }
      std::copy_n(x.begin(), std::min(hash.width, hash.bits - first),
                  matrix.begin() + int64_t{d} * hash.bits + first);
    }
  }
  return matrix;
}

std::vector<float> train_hash(const HeadShape& shape, std::span<const HeadSample> samples,
                              const PolicyOptions& policy, std::span<const float> start,
                              const HashTraining& training) {
  std::vector<float> weights;
  if (training.recipe == HashRecipe::kPublished) {
    training::Random random(training.seed);
    weights = training::train_published(shape, samples, policy, training, random);
  } else {
    weights = training::train_boundary(shape, samples, policy, start, training);
  }
  for (float& w : weights) w = bf16_to_f32(f32_to_bf16(w));
  return weights;
}

namespace {

// Adds up recalls step by step.
class RecallSum {
 public:
  // chosen(token): whether the choice has it.
  template <typename Chosen>
  void add(const HeadAttention& attention, int64_t step, const Chosen& chosen) {
    const std::span<const uint64_t> set = attention.set(step);
    const std::span<const float> shares = attention.shares_of(step);
    double weight = 0, found_weight = 0;
    int64_t found = 0;
    size_t at = 0;
    for (size_t word = 0; word < set.size(); ++word) {
      for (uint64_t left = set[word]; left != 0; left &= left - 1, ++at) {
        const bool hit = chosen(static_cast<int64_t>(word) * 64 + std::countr_zero(left));
        found += hit;
        weight += shares[at];
        if (hit) found_weight += shares[at];
      }
    }
    sum_.tokens += static_cast<double>(found) / static_cast<double>(shares.size());
    sum_.weight += weight > 0 ? found_weight / weight : 1;
    ++steps_;
  }
  Recall mean() const {
    if (steps_ == 0) return {};
    const auto n = static_cast<double>(steps_);
    return {sum_.tokens / n, sum_.weight / n};
  }

 private:
  Recall sum_;
  int64_t steps_ = 0;
};

}  // namespace

Recall hash_recall(const HeadShape& shape, std::span<const HeadSample> samples,
                   const PolicyOptions& policy, std::span<const float> weights, int32_t bits) {
  const SimdTable& simd = simd_table();
  const int64_t dim = shape.head_dim, group = shape.group_size, words = bits / 64;
  CLO_CHECK(std::ssize(weights) == hash_weight_count(dim, bits), weights.size());
  const bool graded = policy.select != Select::kHash;
  const float* bias = weights.data() + dim * bits;
  const auto encode = [&](const float* rows, int64_t count, bool are_keys,
                          std::vector<uint64_t>& codes) {
    std::vector<float> sums(static_cast<size_t>(count * bits));
    multiply(rows, weights.data(), sums.data(), count, dim, bits);
    codes.assign(static_cast<size_t>(count * words), 0);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = 0; j < bits; ++j) {
        const float value = sums[r * bits + j] + (are_keys ? bias[j] : 0.0f);
        codes[r * words + j / 64] |= static_cast<uint64_t>(value > 0) << (j % 64);
      }
    }
  };
  RecallSum sum;
  std::vector<uint8_t> chosen;
  std::vector<float> asked(static_cast<size_t>(dim)), projected(static_cast<size_t>(bits));
  std::vector<uint64_t> keys, more, queries, query(static_cast<size_t>(group * words));
  std::vector<uint16_t> distances;
  std::vector<uint32_t> histogram;
  const float* encoded = nullptr;  // the keys whose codes there are
  int64_t num_encoded = 0;
  for (const HeadSample& sample : samples) {
    const HeadWindow& window = sample.window;
    // Runs of one window have its keys in common.
    if (window.keys.data() != encoded) {
      keys.clear();
      encoded = window.keys.data();
      num_encoded = 0;
    }
    if (num_encoded < window.num_tokens) {
      encode(encoded + num_encoded * dim, window.num_tokens - num_encoded, true, more);
      keys.insert(keys.end(), more.begin(), more.end());
      num_encoded = window.num_tokens;
    }
    if (!graded) encode(window.queries.data(), group * window.num_steps, false, queries);
    for (int64_t step = sample.first_step; step < sample.end_step; ++step) {
      int64_t left = sample.attention->sizes[step];
      if (left == 0) continue;
      const CandidateRange range = candidates(policy, window.context_of(step));
      distances.resize(static_cast<size_t>(range.size()));
      const uint64_t* codes = keys.data() + range.first * words;
      if (graded) {
        std::fill(asked.begin(), asked.end(), 0.0f);
        for (int64_t g = 0; g < group; ++g) {
          const float* one = window.queries.data() + (g * window.num_steps + step) * dim;
          for (int64_t d = 0; d < dim; ++d) asked[d] += one[d];
        }
        multiply(asked.data(), weights.data(), projected.data(), 1, dim, bits);
        const GradedQuery graded_query = grade_projection(projected);
        histogram.assign(static_cast<size_t>(graded_query.most) * bits + 1, 0);
        simd.graded(codes, static_cast<int>(words), range.size(), graded_query.signs,
                    graded_query.planes, distances.data(), histogram.data());
      } else {
        for (int64_t g = 0; g < group; ++g) {
          std::copy_n(queries.begin() + (g * window.num_steps + step) * words, words,
                      query.begin() + g * words);
        }
        histogram.assign(static_cast<size_t>(group * bits + 1), 0);
        simd.hamming(codes, static_cast<int>(words), range.size(), query.data(),
                     static_cast<int>(group), distances.data(), histogram.data());
      }
      uint16_t least = 0;
      while (left > histogram[least]) left -= histogram[least++];
      chosen.assign(static_cast<size_t>(window.num_tokens), 0);
      for (int64_t i = 0; i < range.size(); ++i) {
        const bool tie = distances[i] == least && left > 0;
        left -= tie;
        chosen[range.first + i] = distances[i] < least || tie;
      }
      sum.add(*sample.attention, step, [&](int64_t token) { return chosen[token] != 0; });
    }
  }
  return sum.mean();
}

Recall product_recall(const HeadShape& shape, std::span<const HeadSample> samples,
                      const PolicyOptions& policy) {
  const int64_t dim = shape.head_dim;
  RecallSum sum;
  std::vector<float> columns, votes, scores, sorted;
  for (const HeadSample& sample : samples) {
    const HeadWindow& window = sample.window;
    const int64_t width = padded_columns(window.num_tokens);
    columns.resize(static_cast<size_t>(dim * width));
    transpose(window.keys.data(), window.num_tokens, dim, columns.data(), width);
    const int64_t count = sample.end_step - sample.first_step;
    votes.assign(static_cast<size_t>(count * dim), 0.0f);
    for (int64_t g = 0; g < shape.group_size; ++g) {
      const float* queries =
          window.queries.data() + (g * window.num_steps + sample.first_step) * dim;
      for (int64_t i = 0; i < count * dim; ++i) votes[i] += queries[i];
    }
    scores.assign(static_cast<size_t>(count * width), 0.0f);
    multiply(votes.data(), columns.data(), scores.data(), count, dim, width);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t step = sample.first_step + i, size = sample.attention->sizes[step];
      if (size == 0) continue;
      const CandidateRange range = candidates(policy, window.context_of(step));
      const float* s = scores.data() + i * width;
      sorted.assign(s + range.first, s + range.end);
      std::nth_element(sorted.begin(), sorted.begin() + (size - 1), sorted.end(), std::greater<>());
      sum.add(*sample.attention, step, [&](int64_t token) { return s[token] >= sorted[size - 1]; });
    }
  }
  return sum.mean();
}

}  // namespace clo
