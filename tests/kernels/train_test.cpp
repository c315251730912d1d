// The kernels of hash training, one after another, each against f64 sums of what it was given.
#include "kernels/train/train.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/gpu_test.h"

namespace clo::kernels {
namespace {

class HashTrainTest : public GpuTest {};

struct Sizes {
  int32_t heads, dim, bits, keys, steps;
  int64_t first_key;  // of the window
};

HashTrainStep step_of(const Sizes& s) {
  HashTrainStep step;
  step.heads = s.heads;
  step.width = s.dim;
  step.bits = s.bits;
  step.num_keys = s.keys;
  step.num_steps = s.steps;
  step.label_words = (s.first_key + s.keys + 63) / 64 + 1;
  step.first_key = s.first_key;
  // Gaps between heads.
  step.head_keys = int64_t{s.keys} * s.dim + 32;
  step.head_queries = int64_t{s.steps} * s.dim + 64;
  step.head_labels = s.steps * step.label_words + 3;
  for (int q = 0; q < kBatchQueries; ++q) step.steps[q] = (7 * q + 2) % s.steps;
  step.adam = {0.01f, 0.9f, 0.999f};
  return step;
}

// An eighth of the keys is wanted; nothing at step 0, everything at step 1.
std::vector<uint64_t> labels_of(const Sizes& s, const HashTrainStep& step) {
  std::mt19937_64 random(6);
  std::vector<uint64_t> labels(static_cast<size_t>(s.heads * step.head_labels));
  for (uint64_t& word : labels) word = random() & random() & random();
  for (int64_t h = 0; h < s.heads && s.steps > 2; ++h) {
    const auto first = labels.begin() + h * step.head_labels;
    std::fill(first, first + step.label_words, uint64_t{0});
    std::fill(first + step.label_words, first + 2 * step.label_words, ~uint64_t{0});
  }
  return labels;
}

// The figures of one head, from what the kernels before gave.
class Oracle {
 public:
  Oracle(const HashTrainStep& step, int64_t head, const std::vector<float>& keys,
         const std::vector<float>& queries, const std::vector<uint64_t>& labels)
      : p(step),
        keys_(keys.data() + head * step.head_keys),
        queries_(queries.data() + head * step.head_queries),
        labels_(labels.data() + head * step.head_labels) {}

  const float* input(int64_t column) const {
    if (column < p.num_keys) return keys_ + column * p.width;
    return queries_ + int64_t{p.steps[column - p.num_keys]} * p.width;
  }
  bool wanted(int query, int64_t key) const {
    const int64_t at = p.first_key + key;
    return ((labels_[p.steps[query] * p.label_words + at / 64] >> (at % 64)) & 1u) != 0;
  }
  double asked(const float* codes, int query, int bit) const {
    return codes[(p.num_keys + query) * int64_t{p.bits} + bit];
  }
  // Slopes of the loss at a query's scores.
  std::vector<double> pulls(const float* scores, int query) const {
    std::vector<double> slopes(static_cast<size_t>(p.num_keys), 0.0);
    std::vector<float> sorted(scores, scores + p.num_keys);
    int64_t count = 0;
    for (int64_t k = 0; k < p.num_keys; ++k) count += wanted(query, k);
    if (count == 0 || count == p.num_keys) return slopes;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const float unit = 1 / static_cast<float>(p.bits);
    double of_wanted = 0, of_others = 0;
    for (int64_t k = 0; k < p.num_keys; ++k) {
      slopes[k] = boundary_pull(scores[k], sorted[count], wanted(query, k), unit);
      (wanted(query, k) ? of_wanted : of_others) += slopes[k];
    }
    const auto n = static_cast<double>(count);
    for (int64_t k = 0; k < p.num_keys; ++k) {
      slopes[k] *= wanted(query, k) ? -1 / n : of_wanted / of_others / n;
    }
    return slopes;
  }

  const HashTrainStep& p;

 private:
  const float* keys_;
  const float* queries_;
  const uint64_t* labels_;
};

// Each stage from the one before it on the device, so that errors do not add up.
void check_stages(const Sizes& s) {
  HashTrainStep p = step_of(s);
  const std::vector<float> keys = random_floats(s.heads * p.head_keys, 1);
  const std::vector<float> queries = random_floats(s.heads * p.head_queries, 2);
  const int64_t num_weights = int64_t{s.bits} * s.dim;
  const float unit = 1 / std::sqrt(static_cast<float>(s.dim));
  const std::vector<float> weights = random_floats(s.heads * num_weights, 3, unit);
  const std::vector<float> mean = random_floats(s.heads * num_weights, 4, 0.01f);
  std::vector<float> square = random_floats(s.heads * num_weights, 5, 0.01f);
  for (float& x : square) x *= x;
  const std::vector<uint64_t> labels = labels_of(s, p);
  const DeviceArray<float> device_keys(keys), device_queries(queries), device_weights(weights);
  const DeviceArray<float> device_mean(mean), device_square(square);
  const DeviceArray<uint64_t> device_labels(labels);
  const DeviceArray<float> codes(s.heads * p.num_columns() * s.bits);
  const DeviceArray<float> scores(int64_t{s.heads} * kBatchQueries * s.keys);
  p.keys = device_keys.data();
  p.queries = device_queries.data();
  p.labels = device_labels.data();
  p.weights = device_weights.data();
  p.mean = device_mean.data();
  p.square = device_square.data();
  p.codes = codes.data();
  p.scores = scores.data();

  hash_train_encode(p, nullptr);
  const std::vector<float> relaxed = codes.download();
  hash_train_score(p, nullptr);
  const std::vector<float> products = scores.download();
  hash_train_pull(p, nullptr);
  const std::vector<float> slopes = scores.download();
  hash_train_back(p, nullptr);
  const std::vector<float> back = codes.download();
  hash_train_update(p, nullptr);
  const std::vector<float> new_weights = device_weights.download();
  const std::vector<float> new_mean = device_mean.download();
  const std::vector<float> new_square = device_square.download();

  for (int64_t h = 0; h < s.heads; ++h) {
    const Oracle oracle(p, h, keys, queries, labels);
    const float* w = weights.data() + h * num_weights;
    const float* code = relaxed.data() + h * p.num_columns() * s.bits;
    const float* slope_before = back.data() + h * p.num_columns() * s.bits;
    const float* score = products.data() + h * kBatchQueries * s.keys;
    const float* slope = slopes.data() + h * kBatchQueries * s.keys;
    for (int64_t c = 0; c < p.num_columns(); ++c) {
      for (int b = 0; b < s.bits; ++b) {
        double sum = 0;
        for (int d = 0; d < s.dim; ++d) sum += double{oracle.input(c)[d]} * w[b * s.dim + d];
        const auto projected = static_cast<float>(sum);
        ASSERT_NEAR(code[c * s.bits + b], c < s.keys ? relaxed_sign(projected) : projected, 1e-5)
            << "code of head " << h << ", column " << c << ", bit " << b;
      }
    }
    for (int q = 0; q < kBatchQueries; ++q) {
      std::vector<double> projection;
      for (int b = 0; b < s.bits; ++b) projection.push_back(oracle.asked(code, q, b));
      const std::vector<double> pulls = oracle.pulls(score + q * s.keys, q);
      for (int64_t k = 0; k < s.keys; ++k) {
        double sum = 0;
        for (int b = 0; b < s.bits; ++b) sum += projection[b] * code[k * s.bits + b];
        ASSERT_NEAR(score[q * s.keys + k], sum, 4e-6 * s.bits)
            << "score of head " << h << ", query " << q << ", key " << k;
        ASSERT_NEAR(slope[q * s.keys + k], pulls[k], 1e-5 * std::abs(pulls[k]) + 1e-9)
            << "slope of head " << h << ", query " << q << ", key " << k;
      }
    }
    for (int b = 0; b < s.bits; ++b) {
      for (int64_t k = 0; k < s.keys; ++k) {
        double sum = 0;
        for (int q = 0; q < kBatchQueries; ++q) {
          sum += slope[q * s.keys + k] * oracle.asked(code, q, b);
        }
        ASSERT_NEAR(slope_before[k * s.bits + b], sum * relaxed_slope(code[k * s.bits + b]), 1e-5)
            << "back to head " << h << ", key " << k << ", bit " << b;
      }
      for (int64_t r = 0; r < kBatchQueries; ++r) {
        double sum = 0;
        const float* own = slope + r * s.keys;
        for (int64_t k = 0; k < s.keys; ++k) sum += double{own[k]} * code[k * s.bits + b];
        const int64_t at = (s.keys + r) * s.bits + b;
        ASSERT_NEAR(slope_before[at], sum, 1e-5)
            << "back to head " << h << ", query row " << r << ", bit " << b;
      }
      for (int d = 0; d < s.dim; ++d) {
        double gradient = 0;
        for (int64_t c = 0; c < p.num_columns(); ++c) {
          gradient += double{slope_before[c * s.bits + b]} * oracle.input(c)[d];
        }
        const int64_t at = h * num_weights + int64_t{b} * s.dim + d;
        float weight = weights[at], m = mean[at], v = square[at];
        adam_update(p.adam, static_cast<float>(gradient), weight, m, v);
        ASSERT_NEAR(new_mean[at], m, 2e-5) << "mean of head " << h << " " << b << " " << d;
        ASSERT_NEAR(new_square[at], v, 1e-5 * std::abs(v) + 1e-7);
        ASSERT_NEAR(new_weights[at], weight, 1e-4)
            << "weight of head " << h << " " << b << " " << d;
      }
    }
  }
}

TEST_F(HashTrainTest, SmallStepIsTheSumsOfItsParts) { check_stages({2, 48, 64, 112, 9, 37}); }
TEST_F(HashTrainTest, LeastStepIsTheSumsOfItsParts) { check_stages({1, 16, 64, 16, 3, 0}); }
TEST_F(HashTrainTest, StepOfAnEightBillionModelIsTheSumsOfItsParts) {
  check_stages({3, 144, 128, kMostBatchKeys, 20, 65});
}
TEST_F(HashTrainTest, WideCodesAreTheSumsOfTheirParts) { check_stages({1, 80, 256, 528, 5, 1}); }
TEST_F(HashTrainTest, BitsThatAreNoPowerOfTwoAreTheSumsOfTheirParts) {
  check_stages({2, 64, 192, 1008, 7, 63});
}
TEST_F(HashTrainTest, LargeHeadsAreTheSumsOfTheirParts) { check_stages({1, 256, 128, 64, 4, 5}); }

}  // namespace
}  // namespace clo::kernels
