#pragma once
// Shapes and head caches for properties.
#include <rapidcheck.h>

#include "scene.h"

namespace clo {

inline KvShape arbitrary_shape() {
  KvShape shape;
  shape.num_layers = 1;
  shape.num_kv_heads = *rc::gen::inRange(1, 4);
  shape.num_q_heads = shape.num_kv_heads * *rc::gen::inRange(1, 9);
  shape.head_dim = *rc::gen::element(16, 32, 64, 128);
  shape.type = *rc::gen::element(DType::kF32, DType::kF16, DType::kBF16);
  shape.stored = *rc::gen::element(RowFormat::kFull, RowFormat::kInt8, RowFormat::kFp8);
  shape.code_bits = *rc::gen::element(64, 128, 192, 256);
  return shape;
}

// A length near the borders of pages, or any.
inline int64_t arbitrary_length(int64_t limit) {
  return std::min(limit, *rc::gen::oneOf(rc::gen::element<int64_t>(1, 2, 255, 256, 257, 511, 512),
                                         rc::gen::inRange<int64_t>(1, limit + 1)));
}

inline std::vector<HeadCacheSpec> arbitrary_heads(const KvShape& shape, int64_t capacity) {
  HeadCacheSpec spec;
  spec.sink_tokens = *rc::gen::inRange(0, 6);
  spec.ring_tokens = *rc::gen::inRange(1, 90);
  spec.slot_capacity = *rc::gen::inRange(1, 120);
  spec.capacity_tokens = capacity;
  std::vector<HeadCacheSpec> heads;
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    spec.resident = *rc::gen::arbitrary<bool>();
    heads.push_back(spec);
  }
  return heads;
}

// Some runs of tokens, never the last.
inline std::vector<TokenRange> arbitrary_mask(int64_t tokens) {
  std::vector<TokenRange> ranges;
  for (int64_t t = *rc::gen::inRange<int64_t>(0, tokens); t + 1 < tokens;) {
    const int64_t end = std::min(tokens - 1, t + *rc::gen::element<int64_t>(1, 2, 30, 256, 500));
    ranges.push_back({t, end});
    t = end + *rc::gen::element<int64_t>(0, 1, 20, 250);
  }
  return ranges;
}

}  // namespace clo
