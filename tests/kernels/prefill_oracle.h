#pragma once
// What prefill attention is tested against: random cases and their answer in float64, on the host.
// Used by the tests of this folder only; no CUDA calls.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "ops/kv_layout.h"
#include "tensor/dtype.h"

namespace clo::kernels {

struct PrefillSizes {
  int32_t num_q_heads = 1;
  int32_t num_kv_heads = 1;
  int32_t head_dim = 128;
  int64_t first_token = 0;
  int64_t num_tokens = 1;
  int64_t layer_capacity = 1;
  DType type = DType::kBF16;

  int64_t end_token() const { return first_token + num_tokens; }
  int64_t query_elements() const { return num_tokens * num_q_heads * head_dim; }
  int64_t head_elements() const { return layer_capacity * 2 * head_dim; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  KvShape shape() const {
    return {.num_layers = 1,
            .num_q_heads = num_q_heads,
            .num_kv_heads = num_kv_heads,
            .head_dim = head_dim,
            .type = type};
  }
};

struct PrefillCase {
  PrefillSizes sizes;
  std::vector<uint16_t> queries;  // [num_tokens, num_q_heads * head_dim]
  std::vector<uint16_t> rows;     // [num_kv_heads][layer_capacity][2 * head_dim]

  uint16_t* row(int32_t kv_head, int64_t token) {
    return rows.data() + kv_head * sizes.head_elements() + token * 2 * sizes.head_dim;
  }
};

inline uint16_t rounded(DType type, float value) {
  return type == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
}
inline float widened(DType type, uint16_t bits) {
  return type == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// Unit-normal queries, keys and values; rows past the last token are NaN.
inline PrefillCase make_prefill_case(const PrefillSizes& sizes, uint64_t seed) {
  PrefillCase made;
  made.sizes = sizes;
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  made.queries.resize(static_cast<size_t>(sizes.query_elements()));
  for (uint16_t& value : made.queries) value = rounded(sizes.type, normal(generator));
  made.rows.assign(static_cast<size_t>(sizes.num_kv_heads * sizes.head_elements()),
                   rounded(sizes.type, std::numeric_limits<float>::quiet_NaN()));
  for (int32_t head = 0; head < sizes.num_kv_heads; ++head) {
    uint16_t* row = made.row(head, 0);
    for (int64_t i = 0; i < sizes.end_token() * 2 * sizes.head_dim; ++i) {
      row[i] = rounded(sizes.type, normal(generator));
    }
  }
  return made;
}

// [num_tokens, num_q_heads * head_dim].
inline std::vector<double> reference_attention(const PrefillCase& given) {
  const PrefillSizes& sizes = given.sizes;
  const int64_t dim = sizes.head_dim;
  std::vector<float> rows(given.rows.size());
  convert_to_f32(sizes.type, given.rows.data(), rows.data(), std::ssize(rows));
  std::vector<double> out(static_cast<size_t>(sizes.query_elements()));

  const auto attend = [&](int64_t token, int32_t head, std::vector<double>& weights) {
    const int64_t at = (token * sizes.num_q_heads + head) * dim;
    const int32_t kv_head = head / (sizes.num_q_heads / sizes.num_kv_heads);
    const float* keys = rows.data() + kv_head * sizes.head_elements();
    const int64_t num_keys = sizes.first_token + token + 1;
    std::vector<double> query(static_cast<size_t>(dim));
    for (int64_t d = 0; d < dim; ++d) {
      query[static_cast<size_t>(d)] =
          widened(sizes.type, given.queries[static_cast<size_t>(at + d)]);
    }
    weights.resize(static_cast<size_t>(num_keys));
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < num_keys; ++j) {
      double score = 0;
      for (int64_t d = 0; d < dim; ++d)
        score += query[static_cast<size_t>(d)] * keys[j * 2 * dim + d];
      weights[static_cast<size_t>(j)] = score * static_cast<double>(sizes.scale());
      highest = std::max(highest, weights[static_cast<size_t>(j)]);
    }
    double sum = 0;
    for (int64_t j = 0; j < num_keys; ++j) {
      const double weight = std::exp(weights[static_cast<size_t>(j)] - highest);
      sum += weight;
      for (int64_t d = 0; d < dim; ++d) {
        out[static_cast<size_t>(at + d)] +=
            weight * static_cast<double>(keys[(j * 2 + 1) * dim + d]);
      }
    }
    for (int64_t d = 0; d < dim; ++d) out[static_cast<size_t>(at + d)] /= sum;
  };

  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    std::vector<double> weights;
    const int64_t count = sizes.num_tokens * sizes.num_q_heads;
    for (int64_t i = next++; i < count; i = next++) {
      attend(i / sizes.num_q_heads, static_cast<int32_t>(i % sizes.num_q_heads), weights);
    }
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(work);
  work();
  threads.clear();  // joins
  return out;
}

struct OutputError {
  double relative_l2 = 0;
  double max_abs = 0;
};
// A NaN in the output makes both infinite.
inline OutputError output_error(DType type, std::span<const uint16_t> out,
                                std::span<const double> expected) {
  OutputError error;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double off = std::abs(static_cast<double>(widened(type, out[i])) - expected[i]);
    if (!std::isfinite(off)) {
      return {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
    }
    error.max_abs = std::max(error.max_abs, off);
    difference += off * off;
    norm += expected[i] * expected[i];
  }
  error.relative_l2 = std::sqrt(difference / norm);
  return error;
}

inline constexpr double kMaxRelativeL2 = 1e-2;
inline constexpr double kMaxAbsolute = 2e-2;
inline constexpr int64_t kTestFirstTokens[] = {0, 1, 63, 255, 256, 1000};
inline constexpr int64_t kTestNumTokens[] = {1, 2, 63, 64, 65, 127, 128, 129, 300};

}  // namespace clo::kernels
