#include "profile/train_published.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "profile/matrix.h"
#include "select/set_rule.h"

namespace clo::training {

namespace {

constexpr int kEpochs = 15, kChunks = 3, kIterations = 20;
constexpr float kRate = 0.1f, kMomentum = 0.9f, kDecay = 1e-6f;
constexpr float kSimilarity = 0.01f, kBalance = 1, kDecorrelation = 2;
constexpr float kSharpness = 0.05f;  // 2 sigmoid(0.1 x) - 1 = tanh(0.05 x)
constexpr float kMostLabel = 20;     // of the best key; the least of the top 10 % has 1, others -1

// Pairs of some queries with some earlier keys, each pair with its label.
struct Chunk {
  int64_t rows = 0, keys = 0;
  std::vector<float> queries, query_columns;  // [rows, dim], [dim, rows]
  std::vector<float> key_rows, key_columns;   // [keys, dim], [dim, keys]
  std::vector<float> labels, label_columns;   // [rows, keys], [keys, rows]
  std::vector<float> of_row, of_key;          // sums of labels
};

Chunk take_chunk(const HeadShape& shape, const HeadSample& sample, const PolicyOptions& policy,
                 Random& random) {
  const int64_t dim = shape.head_dim, group = shape.group_size;
  const HeadWindow& window = sample.window;
  const CandidateRange range = candidates(policy, window.context_of(sample.first_step));
  Chunk chunk;
  chunk.rows = group * kQueries;
  chunk.keys = std::min(kMostKeys, range.size() / 16 * 16);
  std::vector<int64_t> tokens(static_cast<size_t>(range.size()));
  std::iota(tokens.begin(), tokens.end(), range.first);
  for (int64_t i = 0; i < chunk.keys; ++i) {
    std::swap(tokens[i], tokens[i + random.below(range.size() - i)]);
    const float* key = window.keys.data() + tokens[i] * dim;
    chunk.key_rows.insert(chunk.key_rows.end(), key, key + dim);
  }
  for (int64_t q = 0; q < kQueries; ++q) {
    const int64_t step = sample.first_step + random.below(sample.end_step - sample.first_step);
    for (int64_t g = 0; g < group; ++g) {
      const float* query = window.queries.data() + (g * window.num_steps + step) * dim;
      chunk.queries.insert(chunk.queries.end(), query, query + dim);
    }
  }
  chunk.key_columns.resize(chunk.key_rows.size());
  transpose(chunk.key_rows.data(), chunk.keys, dim, chunk.key_columns.data(), chunk.keys);
  chunk.query_columns.resize(chunk.queries.size());
  transpose(chunk.queries.data(), chunk.rows, dim, chunk.query_columns.data(), chunk.rows);

  std::vector<float> scores(static_cast<size_t>(chunk.rows * chunk.keys));
  multiply(chunk.queries.data(), chunk.key_columns.data(), scores.data(), chunk.rows, dim,
           chunk.keys);
  chunk.labels.assign(scores.size(), -1.0f);
  const int64_t top = std::max<int64_t>(1, chunk.keys / 10);
  std::vector<int64_t> order(static_cast<size_t>(chunk.keys));
  for (int64_t r = 0; r < chunk.rows; ++r) {
    const float* s = scores.data() + r * chunk.keys;
    std::iota(order.begin(), order.end(), int64_t{0});
    std::partial_sort(order.begin(), order.begin() + top, order.end(),
                      [&](int64_t a, int64_t b) { return s[a] > s[b]; });
    for (int64_t i = 0; i < top; ++i) {
      const float share = top == 1 ? 0 : static_cast<float>(i) / static_cast<float>(top - 1);
      chunk.labels[r * chunk.keys + order[i]] = kMostLabel + share * (1 - kMostLabel);
    }
  }
  chunk.label_columns.resize(chunk.labels.size());
  transpose(chunk.labels.data(), chunk.rows, chunk.keys, chunk.label_columns.data(), chunk.rows);
  chunk.of_row.assign(static_cast<size_t>(chunk.rows), 0.0f);
  chunk.of_key.assign(static_cast<size_t>(chunk.keys), 0.0f);
  for (int64_t r = 0; r < chunk.rows; ++r) {
    for (int64_t k = 0; k < chunk.keys; ++k) {
      chunk.of_row[r] += chunk.labels[r * chunk.keys + k];
      chunk.of_key[k] += chunk.labels[r * chunk.keys + k];
    }
  }
  return chunk;
}

// gradient [bits, dim] of the loss at weights [bits, dim].
class PublishedLoss {
 public:
  PublishedLoss(int64_t dim, int64_t bits) : dim_(dim), bits_(bits) {}
  void slope_of(const Chunk& chunk, const std::vector<float>& weights,
                std::vector<float>& gradient);

 private:
  // Codes of one side [bits, count]; `other` those of the other side as [other_count, bits].
  // pulls [other_count, count] are labels. Replaces codes by the slope at x W.
  void side_slope(std::vector<float>& codes, int64_t count, const std::vector<float>& other_columns,
                  int64_t other_count, const std::vector<float>& pulls,
                  const std::vector<float>& sums, const std::vector<float>& balance);
  int64_t dim_, bits_;
  float scale_ = 0;  // of the similarity term
  std::vector<float> keys_, queries_, key_copy_, pulled_, part_;
};

void PublishedLoss::side_slope(std::vector<float>& codes, int64_t count,
                               const std::vector<float>& other, int64_t other_count,
                               const std::vector<float>& pulls, const std::vector<float>& sums,
                               const std::vector<float>& balance) {
  pulled_.resize(codes.size());
  multiply(other.data(), pulls.data(), pulled_.data(), bits_, other_count, count);
  for (int64_t b = 0; b < bits_; ++b) {
    for (int64_t i = 0; i < count; ++i) {
      float& h = codes[b * count + i];
      h = (scale_ * (sums[i] * h - pulled_[b * count + i]) + balance[b]) * relaxed_slope(h) *
          kSharpness;
    }
  }
}

void PublishedLoss::slope_of(const Chunk& chunk, const std::vector<float>& weights,
                             std::vector<float>& gradient) {
  const int64_t rows = chunk.rows, keys = chunk.keys;
  const auto pairs = static_cast<float>(rows * keys);
  keys_.resize(static_cast<size_t>(bits_ * keys));
  multiply(weights.data(), chunk.key_columns.data(), keys_.data(), bits_, dim_, keys);
  relax(keys_, kSharpness);
  queries_.resize(static_cast<size_t>(bits_ * rows));
  multiply(weights.data(), chunk.query_columns.data(), queries_.data(), bits_, dim_, rows);
  relax(queries_, kSharpness);

  // Bit balance: the mean of a bit over all pairs, squared.
  std::vector<float> for_keys(static_cast<size_t>(bits_)), for_queries(for_keys.size());
  for (int64_t b = 0; b < bits_; ++b) {
    const float of_keys =
        std::accumulate(keys_.begin() + b * keys, keys_.begin() + (b + 1) * keys, 0.0f);
    const float of_rows =
        std::accumulate(queries_.begin() + b * rows, queries_.begin() + (b + 1) * rows, 0.0f);
    const float unit = 1 / (pairs * static_cast<float>(bits_));
    const float mean =
        (static_cast<float>(keys) * of_rows + static_cast<float>(rows) * of_keys) * unit;
    for_keys[b] = 2 * kBalance * mean * static_cast<float>(rows) * unit;
    for_queries[b] = 2 * kBalance * mean * static_cast<float>(keys) * unit;
  }
  scale_ = 2 * kSimilarity / pairs;
  key_copy_ = keys_;
  side_slope(keys_, keys, queries_, rows, chunk.labels, chunk.of_key, for_keys);
  side_slope(queries_, rows, key_copy_, keys, chunk.label_columns, chunk.of_row, for_queries);

  multiply(keys_.data(), chunk.key_rows.data(), gradient.data(), bits_, keys, dim_);
  part_.resize(gradient.size());
  multiply(queries_.data(), chunk.queries.data(), part_.data(), bits_, rows, dim_);
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += part_[i];

  // Decorrelation: the Frobenius norm of W^T W - I, bits by bits.
  std::vector<float> columns(weights.size()), excess(static_cast<size_t>(bits_ * bits_));
  transpose(weights.data(), bits_, dim_, columns.data(), bits_);
  multiply(weights.data(), columns.data(), excess.data(), bits_, dim_, bits_);
  double square = 0;
  for (int64_t b = 0; b < bits_; ++b) excess[b * bits_ + b] -= 1;
  for (const float e : excess) square += double{e} * e;
  multiply(excess.data(), weights.data(), part_.data(), bits_, bits_, dim_);
  const auto factor = static_cast<float>(2 * kDecorrelation / std::sqrt(std::max(square, 1e-20)));
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += factor * part_[i];
}

}  // namespace

std::vector<float> train_published(const HeadShape& shape, std::span<const HeadSample> samples,
                                   const PolicyOptions& policy, const HashTraining& training,
                                   Random& random) {
  const int64_t dim = shape.head_dim, bits = training.bits;
  std::vector<float> weights(static_cast<size_t>(bits * dim)), gradient(weights.size());
  std::vector<float> velocity(weights.size());
  for (float& w : weights) w = random.normal();
  PublishedLoss loss(dim, bits);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (int c = 0; c < kChunks; ++c) {
      const HeadSample& sample = samples[static_cast<size_t>(random.below(std::ssize(samples)))];
      const Chunk chunk = take_chunk(shape, sample, policy, random);
      for (int i = 0; i < kIterations; ++i) {
        loss.slope_of(chunk, weights, gradient);
        for (size_t w = 0; w < weights.size(); ++w) {
          velocity[w] = kMomentum * velocity[w] + gradient[w] + kDecay * weights[w];
          weights[w] -= kRate * velocity[w];
        }
      }
    }
  }
  std::vector<float> result(static_cast<size_t>(hash_weight_count(dim, bits)));  // no bias
  transpose(weights.data(), bits, dim, result.data(), bits);
  return result;
}

}  // namespace clo::training
