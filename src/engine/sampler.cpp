#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>

namespace clo {

namespace {

Error bad_sampling(const char* flag, const char* expected, double found) {
  char number[32];
  std::snprintf(number, sizeof number, "%g", found);
  return Error{ErrorCode::kBadFlag, std::string("expected ") + expected + ", found " + number,
               flag};
}

}  // namespace

Status validate(const SamplingOptions& o) {
  if (!(o.temperature >= 0 && o.temperature <= 100)) {
    return bad_sampling("--temperature", "0 to 100", static_cast<double>(o.temperature));
  }
  if (o.top_k < 0) return bad_sampling("--top-k", "0 (all) or more", o.top_k);
  if (!(o.top_p > 0 && o.top_p <= 1)) {
    return bad_sampling("--top-p", "above 0 and at most 1", static_cast<double>(o.top_p));
  }
  if (!(o.min_p >= 0 && o.min_p <= 1)) {
    return bad_sampling("--min-p", "0 to 1", static_cast<double>(o.min_p));
  }
  if (!(o.repetition_penalty > 0 && o.repetition_penalty <= 100)) {
    return bad_sampling("--repetition-penalty", "above 0 and at most 100",
                        static_cast<double>(o.repetition_penalty));
  }
  return Ok{};
}

double philox_uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy_n(next, 4, c);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c[0]} << 21) ^ (uint64_t{c[1]} >> 11);
  return static_cast<double>(bits & ((uint64_t{1} << 53) - 1)) * 0x1p-53;
}

bool all_finite(std::span<const float> logits) {
  // One comparison a value: NaN and infinity both give a difference that is not zero.
  return std::all_of(logits.begin(), logits.end(), [](float x) { return x - x == 0; });
}

int32_t Sampler::sample(std::span<const float> logits, std::span<const int32_t> answer) {
  scores_.assign(logits.begin(), logits.end());
  if (options_.repetition_penalty != 1) {
    order_.assign(answer.begin(), answer.end());
    std::sort(order_.begin(), order_.end());
    order_.erase(std::unique(order_.begin(), order_.end()), order_.end());
    for (const int32_t id : order_) {
      float& score = scores_[static_cast<size_t>(id)];
      score = score > 0 ? score / options_.repetition_penalty : score * options_.repetition_penalty;
    }
  }
  if (options_.temperature == 0) {
    return static_cast<int32_t>(std::max_element(scores_.begin(), scores_.end()) - scores_.begin());
  }
  order_.resize(scores_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    return scores_[static_cast<size_t>(a)] > scores_[static_cast<size_t>(b)];
  });
  size_t kept = order_.size();
  if (options_.top_k > 0) kept = std::min(kept, static_cast<size_t>(options_.top_k));

  const double best = scores_[static_cast<size_t>(order_[0])];
  const double temperature = static_cast<double>(options_.temperature);
  const auto weight = [&](size_t i) {
    return std::exp((static_cast<double>(scores_[static_cast<size_t>(order_[i])]) - best) /
                    temperature);
  };
  double total = 0;
  for (size_t i = 0; i < kept; ++i) total += weight(i);
  if (options_.top_p < 1) {
    double mass = 0;
    size_t i = 0;
    while (i < kept && mass < static_cast<double>(options_.top_p) * total) mass += weight(i++);
    kept = std::max<size_t>(i, 1);
  }
  if (options_.min_p > 0) {
    size_t i = 1;
    while (i < kept && weight(i) >= static_cast<double>(options_.min_p)) ++i;
    kept = i;
  }
  total = 0;
  for (size_t i = 0; i < kept; ++i) total += weight(i);
  double left = philox_uniform(options_.seed, answer.size()) * total;
  for (size_t i = 0; i < kept; ++i) {
    left -= weight(i);
    if (left < 0) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace clo
