#include "select/hash_signs.h"

#include <bit>

#include "base/units.h"

namespace clo {

namespace {

// SplitMix64: one well-mixed word per counter value (Steele, Lea and Flood, 2014).
uint64_t split_mix(uint64_t& state) {
  state += 0x9E3779B97F4A7C15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace

int32_t hash_width(int32_t head_dim) {
  const auto power = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(head_dim)));
  return power < 32 ? 32 : power;
}

HashSigns::HashSigns(const KvShape& shape, uint64_t seed)
    : shape_(shape), width_(hash_width(shape.head_dim)) {
  const int64_t num_bases = divide_up(shape.code_bits, width_);
  words_per_head_ = num_bases * 2 * (width_ / 32);
  signs_.resize(static_cast<size_t>(words_per_head_ * shape.num_layers * shape.num_kv_heads));
  uint64_t state = seed;
  for (uint32_t& word : signs_) word = static_cast<uint32_t>(split_mix(state) >> 32);
}

HashParams HashSigns::params(int32_t layer, int32_t kv_head) const {
  HashParams params;
  const int64_t head = int64_t{layer} * shape_.num_kv_heads + kv_head;
  params.signs = signs_.data() + head * words_per_head_;
  params.head_dim = shape_.head_dim;
  params.width = width_;
  params.bits = shape_.code_bits;
  return params;
}

}  // namespace clo
