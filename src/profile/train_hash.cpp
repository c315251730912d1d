#include "profile/train_hash.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "profile/matrix.h"
#include "profile/train_published.h"
#include "profile/training_parts.h"
#include "reference/simd.h"
#include "select/set_rule.h"
#include "tensor/dtype.h"

namespace clo {

using training::kMostKeys;
using training::kQueries;
using training::Random;
using training::relax;
using training::slope;

namespace {

// Scales each row of x [rows, dim] to length sqrt(dim): a code depends on the direction alone, and
// so does the loss then.
void normalise_rows(std::vector<float>& x, int64_t dim) {
  for (int64_t first = 0; first + dim <= std::ssize(x); first += dim) {
    double square = 0;
    for (int64_t d = 0; d < dim; ++d) square += double{x[first + d]} * x[first + d];
    if (!(square > 0)) continue;
    const auto scale = static_cast<float>(std::sqrt(static_cast<double>(dim) / square));
    for (int64_t d = 0; d < dim; ++d) x[first + d] *= scale;
  }
}

constexpr float kSharpness = 30;  // of the boundary, in shares of all bits
constexpr float kRate = 0.01f;    // of Adam at the start; it falls to 0 along a cosine

// A window made ready: keys of its candidates in random order, so that any run of them is a sample.
struct Prepared {
  std::vector<int32_t> tokens;  // [count]
  std::vector<float> keys;      // [count, dim]
  std::vector<float> columns;   // [dim, count]
  std::vector<float> queries;   // [group, steps, dim]
  int64_t count = 0;
};

Prepared prepare(const HeadShape& shape, const HeadSample& sample, const PolicyOptions& policy,
                 Random& random) {
  const int64_t dim = shape.head_dim;
  const CandidateRange range = candidates(policy, sample.window.context_of(sample.first_step));
  Prepared made;
  made.count = range.size();
  made.tokens.resize(static_cast<size_t>(made.count));
  std::iota(made.tokens.begin(), made.tokens.end(), static_cast<int32_t>(range.first));
  for (int64_t i = made.count - 1; i > 0; --i) {
    std::swap(made.tokens[i], made.tokens[random.below(i + 1)]);
  }
  made.keys.resize(static_cast<size_t>(made.count * dim));
  for (int64_t i = 0; i < made.count; ++i) {
    std::copy_n(sample.window.keys.data() + int64_t{made.tokens[i]} * dim, dim,
                made.keys.data() + i * dim);
  }
  made.queries.assign(sample.window.queries.begin(), sample.window.queries.end());
  normalise_rows(made.keys, dim);
  normalise_rows(made.queries, dim);
  made.columns.resize(made.keys.size());
  transpose(made.keys.data(), made.count, dim, made.columns.data(), made.count);
  return made;
}

// Adam (Kingma and Ba, 2015) over one matrix.
class Adam {
 public:
  explicit Adam(size_t size) : mean_(size), square_(size) {}
  void step(std::vector<float>& weights, const std::vector<float>& gradient, float rate) {
    decay1_ *= 0.9f;
    decay2_ *= 0.999f;
    for (size_t i = 0; i < weights.size(); ++i) {
      mean_[i] = 0.9f * mean_[i] + 0.1f * gradient[i];
      square_[i] = 0.999f * square_[i] + 0.001f * gradient[i] * gradient[i];
      weights[i] -=
          rate * (mean_[i] / (1 - decay1_)) / (std::sqrt(square_[i] / (1 - decay2_)) + 1e-12f);
    }
  }

 private:
  std::vector<float> mean_, square_;
  float decay1_ = 1, decay2_ = 1;
};

// One step's matrices: bits x keys and the like, all kept between steps.
class Trainer {
 public:
  Trainer(const HeadShape& shape, int32_t num_bits)
      : group(shape.group_size), dim(shape.head_dim), bits(num_bits) {}

  int64_t group, dim, bits;
  int64_t num_keys = 0;
  std::vector<float> key_columns;  // [dim, keys]
  std::vector<float> key_rows;     // [keys, dim]
  std::vector<float> query_rows;   // [group * kQueries, dim]
  std::vector<float> label;        // [kQueries, keys]: 1 in the exact set, else 0
  std::vector<float> key_codes;    // [bits, keys] relaxed
  std::vector<float> query_codes;  // [bits, group * kQueries] relaxed
  std::vector<float> votes;        // [kQueries, bits] sum over the group
  std::vector<float> scores;       // [kQueries, keys]
  std::vector<float> gradient;     // [bits, dim]

  void load(const HeadSample& sample, const Prepared& made, Random& random);
  void forward(const std::vector<float>& weights);
  void backward();

 private:
  std::vector<float> query_columns_;  // [dim, group * kQueries]
  std::vector<float> votes_columns_;  // [bits, kQueries]
  std::vector<float> score_rows_;     // [keys, kQueries]
  std::vector<float> from_keys_, from_queries_, part_;
};

void Trainer::load(const HeadSample& sample, const Prepared& made, Random& random) {
  num_keys = std::min(kMostKeys, made.count / 16 * 16);
  const int64_t first = random.below(made.count - num_keys + 1);
  key_rows.assign(made.keys.begin() + first * dim, made.keys.begin() + (first + num_keys) * dim);
  key_columns.resize(static_cast<size_t>(dim * num_keys));
  for (int64_t d = 0; d < dim; ++d) {
    std::copy_n(made.columns.data() + d * made.count + first, num_keys,
                key_columns.data() + d * num_keys);
  }
  query_rows.resize(static_cast<size_t>(group * kQueries * dim));
  label.resize(static_cast<size_t>(kQueries * num_keys));
  for (int64_t q = 0; q < kQueries; ++q) {
    const int64_t step = sample.first_step + random.below(sample.end_step - sample.first_step);
    for (int64_t g = 0; g < group; ++g) {
      std::copy_n(made.queries.data() + (g * sample.window.num_steps + step) * dim, dim,
                  query_rows.data() + (g * kQueries + q) * dim);
    }
    const std::span<const uint64_t> set = sample.attention->set(step);
    for (int64_t i = 0; i < num_keys; ++i) {
      const int32_t token = made.tokens[first + i];
      label[q * num_keys + i] = static_cast<float>((set[token / 64] >> (token % 64)) & 1u);
    }
  }
}

void Trainer::forward(const std::vector<float>& weights) {
  const int64_t rows = group * kQueries;
  key_codes.resize(static_cast<size_t>(bits * num_keys));
  multiply(weights.data(), key_columns.data(), key_codes.data(), bits, dim, num_keys);
  relax(key_codes, 1);
  query_columns_.resize(static_cast<size_t>(dim * rows));
  transpose(query_rows.data(), rows, dim, query_columns_.data(), rows);
  query_codes.resize(static_cast<size_t>(bits * rows));
  multiply(weights.data(), query_columns_.data(), query_codes.data(), bits, dim, rows);
  relax(query_codes, 1);
  votes.assign(static_cast<size_t>(kQueries * bits), 0.0f);
  for (int64_t b = 0; b < bits; ++b) {
    for (int64_t r = 0; r < rows; ++r)
      votes[(r % kQueries) * bits + b] += query_codes[b * rows + r];
  }
  scores.resize(static_cast<size_t>(kQueries * num_keys));
  multiply(votes.data(), key_codes.data(), scores.data(), kQueries, bits, num_keys);
}

// From the slope of the loss at each score, which stands in `scores`, to that at each weight.
void Trainer::backward() {
  const int64_t rows = group * kQueries;
  votes_columns_.resize(votes.size());
  transpose(votes.data(), kQueries, bits, votes_columns_.data(), kQueries);
  from_keys_.resize(key_codes.size());
  multiply(votes_columns_.data(), scores.data(), from_keys_.data(), bits, kQueries, num_keys);
  for (size_t i = 0; i < from_keys_.size(); ++i) from_keys_[i] *= slope(key_codes[i]);
  gradient.resize(static_cast<size_t>(bits * dim));
  multiply(from_keys_.data(), key_rows.data(), gradient.data(), bits, num_keys, dim);

  score_rows_.resize(scores.size());
  transpose(scores.data(), kQueries, num_keys, score_rows_.data(), kQueries);
  part_.resize(static_cast<size_t>(bits * kQueries));
  multiply(key_codes.data(), score_rows_.data(), part_.data(), bits, num_keys, kQueries);
  from_queries_.resize(query_codes.size());
  for (int64_t b = 0; b < bits; ++b) {
    for (int64_t r = 0; r < rows; ++r) {
      from_queries_[b * rows + r] =
          part_[b * kQueries + r % kQueries] * slope(query_codes[b * rows + r]);
    }
  }
  part_.resize(static_cast<size_t>(bits * dim));
  multiply(from_queries_.data(), query_rows.data(), part_.data(), bits, rows, dim);
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += part_[i];
}

// Replaces each query's scores by the slope of its loss. The boundary lies at the score of rank
// (keys that are in the exact set); a key on the wrong side of it costs by how far.
void boundary_loss(Trainer& t, std::vector<float>& sorted) {
  const float unit = 1 / static_cast<float>(t.bits * t.group);
  for (int64_t q = 0; q < kQueries; ++q) {
    float* s = t.scores.data() + q * t.num_keys;
    const float* label = t.label.data() + q * t.num_keys;
    int64_t wanted = 0;
    for (int64_t i = 0; i < t.num_keys; ++i) wanted += label[i] > 0;
    if (wanted == 0 || wanted == t.num_keys) {
      std::fill_n(s, t.num_keys, 0.0f);
      continue;
    }
    sorted.assign(s, s + t.num_keys);
    std::nth_element(sorted.begin(), sorted.begin() + wanted, sorted.end(), std::greater<>());
    const float boundary = sorted[wanted];
    float wanted_pull = 0, other_pull = 0;
    for (int64_t i = 0; i < t.num_keys; ++i) {
      // The slope of log(1 + exp(-z)), with z > 0 on the right side.
      const float side = label[i] > 0 ? 1.0f : -1.0f;
      const float z = side * kSharpness * unit * (s[i] - boundary);
      const float pull = 1 / (1 + std::exp(std::min(z, 30.0f)));
      (label[i] > 0 ? wanted_pull : other_pull) += pull;
      s[i] = -side * pull;
    }
    // The boundary moves with the scores, so nothing is won by moving all of them: both sides pull
    // equally.
    const float of_wanted = 1 / static_cast<float>(wanted);
    const float of_others = of_wanted * wanted_pull / std::max(other_pull, 1e-20f);
    for (int64_t i = 0; i < t.num_keys; ++i) s[i] *= label[i] > 0 ? of_wanted : of_others;
  }
}

std::vector<float> train_boundary(const HeadShape& shape, std::span<const HeadSample> samples,
                                  std::span<const Prepared> prepared, std::span<const float> start,
                                  const HashTraining& training, Random& random) {
  const int64_t dim = shape.head_dim, bits = training.bits;
  std::vector<float> weights(static_cast<size_t>(bits * dim));  // [bits, dim], rows of length 1
  transpose(start.data(), dim, bits, weights.data(), dim);
  normalise_rows(weights, dim);
  for (float& w : weights) w /= std::sqrt(static_cast<float>(dim));
  Trainer trainer(shape, training.bits);
  Adam adam(weights.size());
  std::vector<float> sorted;
  for (int32_t i = 0; i < training.iterations; ++i) {
    if (training.keep_going && !training.keep_going()) break;
    const auto w = static_cast<size_t>(random.below(std::ssize(samples)));
    trainer.load(samples[w], prepared[w], random);
    trainer.forward(weights);
    boundary_loss(trainer, sorted);
    trainer.backward();
    const double done = static_cast<double>(i) / training.iterations;
    adam.step(weights, trainer.gradient,
              kRate * static_cast<float>(0.5 * (1 + std::cos(3.141592653589793 * done))));
  }
  std::vector<float> result(weights.size());
  transpose(weights.data(), bits, dim, result.data(), bits);
  return result;
}

}  // namespace

std::vector<float> projection_matrix(const HashParams& hash) {
  CLO_CHECK(hash.weights == nullptr);
  std::vector<float> matrix(static_cast<size_t>(hash.head_dim) * hash.bits);
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
  Random random(training.seed);
  const auto rounded = [](std::vector<float> weights) {
    for (float& w : weights) w = bf16_to_f32(f32_to_bf16(w));
    return weights;
  };
  if (training.recipe == HashRecipe::kPublished) {
    return rounded(training::train_published(shape, samples, policy, training, random));
  }
  std::vector<Prepared> prepared;
  for (const HeadSample& sample : samples) {
    CLO_CHECK(sample.end_step > sample.first_step, sample.first_step, sample.end_step);
    prepared.push_back(prepare(shape, sample, policy, random));
    CLO_CHECK(prepared.back().count >= 16, prepared.back().count);
  }
  return rounded(train_boundary(shape, samples, prepared, start, training, random));
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
  const auto encode = [&](const float* rows, int64_t count, std::vector<uint64_t>& codes) {
    std::vector<float> sums(static_cast<size_t>(count * bits));
    multiply(rows, weights.data(), sums.data(), count, dim, bits);
    codes.assign(static_cast<size_t>(count * words), 0);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t j = 0; j < bits; ++j) {
        codes[r * words + j / 64] |= static_cast<uint64_t>(sums[r * bits + j] > 0) << (j % 64);
      }
    }
  };
  RecallSum sum;
  std::vector<uint8_t> chosen;
  std::vector<uint64_t> keys, queries, query(static_cast<size_t>(group * words));
  std::vector<uint16_t> distances;
  std::vector<uint32_t> histogram;
  for (const HeadSample& sample : samples) {
    const HeadWindow& window = sample.window;
    encode(window.keys.data(), window.num_tokens, keys);
    encode(window.queries.data(), group * window.num_steps, queries);
    for (int64_t step = sample.first_step; step < sample.end_step; ++step) {
      int64_t left = sample.attention->sizes[step];
      if (left == 0) continue;
      const CandidateRange range = candidates(policy, window.context_of(step));
      for (int64_t g = 0; g < group; ++g) {
        std::copy_n(queries.begin() + (g * window.num_steps + step) * words, words,
                    query.begin() + g * words);
      }
      distances.resize(static_cast<size_t>(range.size()));
      histogram.assign(static_cast<size_t>(group * bits + 1), 0);
      simd.hamming(keys.data() + range.first * words, static_cast<int>(words), range.size(),
                   query.data(), static_cast<int>(group), distances.data(), histogram.data());
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
