#pragma once
// What two rows of logits say of the next token.
#include <cstddef>
#include <span>

namespace clo {

// log of the sum of exp(row). Requires: not empty.
double log_sum_exp(std::span<const float> row);
// The most likely token; the lowest of several.
size_t most_likely(std::span<const float> row);
// KL(p || q) of the softmax of both, nats. Requires: the same length.
double kl_divergence(std::span<const float> p, std::span<const float> q);

}  // namespace clo
