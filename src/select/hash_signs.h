#pragma once
// The random orthogonal projection that makes key codes when no trained weights are given: sign
// patterns from a fixed seed, so that every backend and every run computes the same bits.
// A base is H S2 H S1 (S: random signs, H: Walsh-Hadamard); `width` bits come from each base.
#include <cstdint>
#include <vector>

#include "ops/params.h"

namespace clo {

inline constexpr uint64_t kHashSeed = 0x434C4F2D68617368;

// head_dim rounded up to a power of two, at least 32: the length of the transform.
int32_t hash_width(int32_t head_dim);

class HashSigns {
 public:
  // Signs of all layers and KV heads for codes of shape.code_bits bits.
  HashSigns(const KvShape& shape, uint64_t seed);

  // The projection of one layer and KV head; points into this object.
  HashParams params(int32_t layer, int32_t kv_head) const;

 private:
  KvShape shape_;
  int32_t width_ = 0;
  int64_t words_per_head_ = 0;   // num_bases * 2 rounds * width / 32
  std::vector<uint32_t> signs_;  // [layer][kv_head][base][round][width / 32]
};

}  // namespace clo
