#pragma once
// One layer of one sequence in plain memory, for the tests of operations, and naive loops in double
// precision to compare with. Rows are placed by the rules of the layout's headers, never by the
// code under test. Memory that nothing wrote is NaN, so that reading it shows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "kv/head_cache.h"
#include "ops/params.h"
#include "ops/stored_row.h"
#include "ops/token_mask.h"
#include "select/hash_signs.h"

namespace clo {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  float normal() { return distribution_(engine_); }
  std::vector<float> normals(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal();
    return values;
  }
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit));
  }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> distribution_;
};

// 64-byte aligned bytes, exactly as many as asked for, all 0xFF: NaN in every type.
class Bytes {
 public:
  explicit Bytes(int64_t size)
      : size_(static_cast<size_t>(size)),
        data_(static_cast<std::byte*>(::operator new(size_, kAlign))) {
    std::memset(data_.get(), 0xFF, size_);
  }
  std::byte* data() const { return data_.get(); }
  bool operator==(const Bytes& other) const {
    return size_ == other.size_ && std::memcmp(data(), other.data(), size_) == 0;
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Delete {
    void operator()(std::byte* bytes) const { ::operator delete(bytes, kAlign); }
  };
  size_t size_;
  std::unique_ptr<std::byte, Delete> data_;
};

class Scene {
 public:
  // `heads`: one spec per KV head, all of the same capacity. Rows of all tokens are drawn from
  // `seed`; place() puts them where they belong.
  Scene(const KvShape& kv_shape, const std::vector<HeadCacheSpec>& heads, uint64_t seed)
      : shape(kv_shape), capacity(heads.at(0).capacity_tokens) {
    Random random(seed);
    keys = random.normals(capacity * row_stride());
    values = random.normals(capacity * row_stride());
    for (const HeadCacheSpec& spec : heads) {
      blocks.emplace_back(head_cache_bytes(shape, spec));
      views.push_back(bind_head_cache(shape, spec, blocks.back().data()));
    }
    for (int64_t page = 0; page * kPageTokens < capacity; ++page) {
      pages.emplace_back(shape.num_kv_heads * int64_t{kPageTokens} * shape.stored_row_bytes());
      host_rows.push_back(pages.back().data());
      for (auto* codes : {&host_codes, &device_codes}) {
        pages_of_codes.emplace_back(
            std::max<int64_t>(8, shape.num_kv_heads * int64_t{kPageTokens} * shape.code_bytes()));
        codes->push_back(reinterpret_cast<uint64_t*>(pages_of_codes.back().data()));
      }
    }
    view.host_rows = host_rows.data();
    if (shape.code_bits > 0) {
      view.host_codes = host_codes.data();
      view.device_codes = device_codes.data();
    }
    view.heads = views.data();
  }

  int64_t row_stride() const { return int64_t{shape.num_kv_heads} * shape.head_dim; }
  const float* key(int64_t token, int32_t head) const {
    return keys.data() + token * row_stride() + int64_t{head} * shape.head_dim;
  }
  const float* value(int64_t token, int32_t head) const {
    return values.data() + token * row_stride() + int64_t{head} * shape.head_dim;
  }
  // As a full row holds it, after rounding to the row's type.
  float rounded(const float* x) const {
    if (shape.type == DType::kF32) return *x;
    return shape.type == DType::kF16 ? f16_to_f32(f32_to_f16(*x)) : bf16_to_f32(f32_to_bf16(*x));
  }
  std::byte* host_row(int64_t token, int32_t head) const {
    return host_rows[static_cast<size_t>(token / kPageTokens)] +
           (int64_t{head} * kPageTokens + token % kPageTokens) * shape.stored_row_bytes();
  }
  // K and V [2 * head_dim] as the row's full form or its stored one means them.
  std::vector<float> row_values(int64_t token, int32_t head, bool full) const {
    const auto dim = static_cast<size_t>(shape.head_dim);
    std::vector<float> of_row(2 * dim);
    for (size_t d = 0; d < dim; ++d) {
      of_row[d] = rounded(key(token, head) + d);
      of_row[dim + d] = rounded(value(token, head) + d);
    }
    if (full || !shape.compressed()) return of_row;
    std::vector<std::byte> row(static_cast<size_t>(shape.stored_row_bytes()));
    compress_row(shape, of_row.data(), of_row.data() + dim, row.data());
    expand_row(shape, row.data(), of_row.data(), of_row.data() + dim);
    return of_row;
  }
  // Whether decode attention at this length finds the token in sink or ring.
  bool is_fixed(int64_t token, int32_t head, int64_t context) const {
    const HeadCacheView& view_of_head = views[static_cast<size_t>(head)];
    return token < view_of_head.sink_tokens || token >= context - view_of_head.ring_tokens;
  }

  void write_row(std::byte* row, int64_t token, int32_t head) const {
    convert_from_f32(shape.type, key(token, head), row, shape.head_dim);
    convert_from_f32(shape.type, value(token, head), row + shape.value_offset(), shape.head_dim);
  }
  void write_stored_row(std::byte* row, int64_t token, int32_t head) const {
    if (!shape.compressed()) return write_row(row, token, head);
    const std::vector<float> of_row = row_values(token, head, true);
    compress_row(shape, of_row.data(), of_row.data() + shape.head_dim, row);
  }
  // Memory as it is once the sequence has `context` tokens.
  void place(int64_t context) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const HeadCacheView& head = views[static_cast<size_t>(h)];
      for (int64_t t = 0; t < context; ++t) {
        write_stored_row(host_row(t, h), t, h);
        if (head.is_resident()) {
          write_stored_row(head.resident + t * shape.stored_row_bytes(), t, h);
          if (!shape.compressed()) continue;
        }
        if (t < head.sink_tokens) write_row(head.sink + t * shape.row_bytes(), t, h);
        if (t >= context - head.ring_tokens) {
          write_row(head.ring + t % head.ring_tokens * shape.row_bytes(), t, h);
        }
      }
    }
  }
  // Slot i of a head gets slot_tokens[i] and its row; -1 is a hole.
  void fill_slots(int32_t h, const std::vector<int32_t>& slot_tokens) {
    const HeadCacheView& head = views[static_cast<size_t>(h)];
    head.state->num_slots_used = static_cast<int32_t>(slot_tokens.size());
    head.state->num_set_tokens = 0;
    for (size_t slot = 0; slot < slot_tokens.size(); ++slot) {
      const int32_t token = slot_tokens[slot];
      head.slot_token[slot] = token;
      if (token < 0) continue;
      ++head.state->num_set_tokens;
      if (head.is_resident()) continue;
      head.held[token / 64] |= uint64_t{1} << (token % 64);
      write_stored_row(head.slots + static_cast<int64_t>(slot) * shape.stored_row_bytes(), token,
                       h);
    }
  }

  HeadTask task(int32_t h, const float* query, float* out, int64_t context) {
    HeadTask made;
    made.head = &views[static_cast<size_t>(h)];
    made.sequence = &view;
    made.query = query;
    made.out = out;
    made.context_tokens = context;
    made.kv_head = h;
    return made;
  }

  KvShape shape;
  int64_t capacity;
  std::vector<float> keys, values;  // [capacity, num_kv_heads, head_dim] before rounding
  std::vector<Bytes> blocks, pages, pages_of_codes;
  std::vector<HeadCacheView> views;
  std::vector<std::byte*> host_rows;
  std::vector<uint64_t*> host_codes, device_codes;
  SequenceLayerView view;
};

// Softmax attention of one group of queries over the rows of `tokens`, term by term. With a context
// as decode attention reads them, sink and ring in full; with kAllStored as prefill does.
inline constexpr int64_t kAllStored = -1;
struct NaiveAttention {
  std::vector<double> out;          // [group_size, head_dim]
  std::vector<double> log_sum_exp;  // [group_size]
};
inline NaiveAttention naive_attention(const Scene& scene, int32_t head,
                                      const std::vector<int64_t>& tokens, const float* queries,
                                      double scale, int64_t context) {
  const int group = scene.shape.group_size(), dim = scene.shape.head_dim;
  std::vector<std::vector<float>> rows;
  for (const int64_t t : tokens) {
    rows.push_back(scene.row_values(t, head, context >= 0 && scene.is_fixed(t, head, context)));
  }
  NaiveAttention result;
  result.out.assign(static_cast<size_t>(group * dim), 0.0);
  for (int g = 0; g < group; ++g) {
    std::vector<double> scores;
    double best = -INFINITY;
    for (const std::vector<float>& row : rows) {
      double dot = 0;
      for (int d = 0; d < dim; ++d) dot += static_cast<double>(queries[g * dim + d]) * row[d];
      scores.push_back(dot * scale);
      best = std::max(best, scores.back());
    }
    double total = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      const double weight = std::exp(scores[i] - best);
      total += weight;
      for (int d = 0; d < dim; ++d) {
        result.out[static_cast<size_t>(g * dim + d)] += weight * rows[i][dim + d];
      }
    }
    for (int d = 0; d < dim; ++d) result.out[static_cast<size_t>(g * dim + d)] /= total;
    result.log_sum_exp.push_back(best + std::log(total));
  }
  return result;
}

// Every kind of full row, and compressed ones beside each.
inline const std::vector<std::pair<DType, RowFormat>> kRowKinds = {
    {DType::kF32, RowFormat::kFull},  {DType::kF16, RowFormat::kFull},
    {DType::kBF16, RowFormat::kFull}, {DType::kF32, RowFormat::kInt8},
    {DType::kF16, RowFormat::kInt8},  {DType::kBF16, RowFormat::kInt8},
    {DType::kBF16, RowFormat::kFp8},  {DType::kF32, RowFormat::kFp8}};

// Largest |a - b|; infinite when a NaN is in one and not in the other.
inline double largest_error(const std::vector<double>& expected, const float* found) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isnan(expected[i]) != std::isnan(found[i])) return INFINITY;
    if (!std::isnan(expected[i])) worst = std::max(worst, std::abs(expected[i] - found[i]));
  }
  return worst;
}

// Bounds for attention with normal keys, values and queries and scale 1/sqrt(head_dim): a score is
// an f32 sum of at most 128 products of size 1 (error near 1e-6), its exponential is good to 3e-7,
// and rows number a few thousand in blocks of 64. Five times the largest error seen.
inline constexpr double kAttentionError = 2e-5;

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace clo
