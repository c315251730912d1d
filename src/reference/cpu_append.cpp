// Appending rows, and the codes of keys.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/stored_row.h"
#include "reference/cpu_ops.h"

namespace clo {

namespace {

// out [bits]: projections of x, which start from a bias where one is given. Each is a sum in the
// order of d with a rounded product each, whatever the processor.
void project(const SimdTable& simd, const HashParams& hash, const float* x, const float* bias,
             float* scratch, float* out) {
  if (hash.weights != nullptr) {
    if (bias != nullptr) {
      std::copy_n(bias, hash.bits, out);
    } else {
      std::fill_n(out, hash.bits, 0.0f);
    }
    for (int d = 0; d < hash.head_dim; ++d) {
      const float* weights = hash.weights + int64_t{d} * hash.bits;
      for (int j = 0; j < hash.bits; ++j) out[j] += x[d] * weights[j];
    }
    return;
  }
  const int width = hash.width;
  const uint32_t* signs = hash.signs;
  for (int first = 0; first < hash.bits; first += width) {
    std::memcpy(scratch, x, sizeof(float) * static_cast<size_t>(hash.head_dim));
    std::memset(scratch + hash.head_dim, 0,
                sizeof(float) * static_cast<size_t>(width - hash.head_dim));
    for (int round = 0; round < 2; ++round) {
      simd.hadamard(scratch, signs, width);
      signs += width / 32;
    }
    std::copy_n(scratch, std::min(width, hash.bits - first), out + first);
  }
}

// The bits are as good as random, so a branch on them would be missed every other time.
void set_bit(uint64_t* code, int bit, bool value) {
  code[bit / 64] |= static_cast<uint64_t>(value) << (bit % 64);
}

}  // namespace

void encode_row(const SimdTable& simd, const HashParams& hash, const float* x, bool is_key,
                uint64_t* out, float* scratch) {
  const float* bias = is_key && hash.weights != nullptr
                          ? hash.weights + int64_t{hash.head_dim} * hash.bits
                          : nullptr;
  float values[kMaxCodeBits];
  project(simd, hash, x, bias, scratch, values);
  std::memset(out, 0, static_cast<size_t>(hash.bits / 8));
  for (int j = 0; j < hash.bits; ++j) set_bit(out, j, values[j] > 0);
}

GradedQuery grade_query(const SimdTable& simd, const HashParams& hash, const float* queries,
                        int group) {
  float sum[kMaxHeadDim], scratch[kMaxHeadDim], values[kMaxCodeBits];
  std::copy_n(queries, hash.head_dim, sum);
  for (int g = 1; g < group; ++g) {
    for (int d = 0; d < hash.head_dim; ++d) sum[d] += queries[g * hash.head_dim + d];
  }
  project(simd, hash, sum, nullptr, scratch, values);
  return grade_projection({values, static_cast<size_t>(hash.bits)});
}

GradedQuery grade_projection(std::span<const float> values) {
  const auto bits = static_cast<int32_t>(values.size());
  GradedQuery query;
  query.most = most_bit_weight(bits);
  float largest = 0;
  for (const float v : values) largest = std::max(largest, std::abs(v) >= 0 ? std::abs(v) : 0.0f);
  const float steps = weight_steps(query.most, largest);
  for (int32_t j = 0; j < bits; ++j) {
    set_bit(query.signs, j, values[j] > 0);
    const int32_t weight = bit_weight(std::abs(values[j]), steps, query.most);
    for (int p = 0; p < kWeightPlanes; ++p) {
      set_bit(query.planes + p * (bits / 64), j, (weight >> p & 1) != 0);
    }
  }
  return query;
}

void CpuOps::append(const AppendParams& p) {
  const KvShape& shape = p.shape;
  const int64_t tokens = p.tokens_per_sequence;
  const int64_t row_bytes = shape.row_bytes(), stored_bytes = shape.stored_row_bytes();
  const int words = shape.code_words();
  const int64_t work = p.num_sequences * tokens * shape.num_kv_heads;
  const auto append_one = [&](int64_t w) {
    const auto head = static_cast<int32_t>(w % shape.num_kv_heads);
    const int64_t row_index = w / shape.num_kv_heads;
    const int64_t s = row_index / tokens;
    const int64_t position = p.first_token[s] + row_index % tokens;
    const SequenceLayerView& sequence = p.sequences[s];
    const float* key = p.keys + row_index * p.row_stride + int64_t{head} * shape.head_dim;
    const float* value = p.values + row_index * p.row_stride + int64_t{head} * shape.head_dim;

    alignas(16) std::byte row[2 * kMaxHeadDim * sizeof(float)];
    simd_.from_f32(shape.type, key, row, shape.head_dim);
    simd_.from_f32(shape.type, value, row + shape.value_offset(), shape.head_dim);
    const auto put = [&](std::byte* target) {
      std::memcpy(target, row, static_cast<size_t>(row_bytes));
    };
    float key_values[kMaxHeadDim];  // of the full row; made where somebody reads them
    alignas(16) std::byte compressed[2 * kMaxHeadDim + 16];
    const std::byte* stored = row;
    if (shape.compressed()) {
      float values[kMaxHeadDim];
      simd_.widen_row(full_kind(shape), row, shape.head_dim, key_values, values);
      compress_row(shape, key_values, values, compressed);
      stored = compressed;
    }
    const auto put_stored = [&](std::byte* target) {
      std::memcpy(target, stored, static_cast<size_t>(stored_bytes));
    };

    const HeadCacheView& cache = sequence.heads[head];
    if (cache.is_resident()) put_stored(cache.resident + position * stored_bytes);
    if (!cache.is_resident() || shape.compressed()) {
      if (position < cache.sink_tokens) put(cache.sink + position * row_bytes);
      // Of a long run only the last ring_tokens rows stay; earlier ones would be overwritten.
      if (position + cache.ring_tokens >= p.first_token[s] + tokens) {
        put(cache.ring + (position % cache.ring_tokens) * row_bytes);
      }
    }
    const int64_t page = position / kPageTokens;
    const int64_t slot = int64_t{head} * kPageTokens + position % kPageTokens;
    if (sequence.host_rows != nullptr) put_stored(sequence.host_rows[page] + slot * stored_bytes);
    if (p.hashes != nullptr &&
        (sequence.host_codes != nullptr || sequence.device_codes != nullptr)) {
      // The code is of the full row's key, the same however rows are stored.
      float scratch[kMaxHeadDim];
      uint64_t code[kMaxCodeBits / 64];
      if (!shape.compressed()) simd_.to_f32(shape.type, row, key_values, shape.head_dim);
      encode_row(simd_, p.hashes[head], key_values, true, code, scratch);
      const auto code_bytes = static_cast<size_t>(shape.code_bytes());
      if (sequence.host_codes != nullptr) {
        std::memcpy(sequence.host_codes[page] + slot * words, code, code_bytes);
      }
      if (sequence.device_codes != nullptr) {
        std::memcpy(sequence.device_codes[page] + slot * words, code, code_bytes);
      }
    }
  };
  pool_.run_ranges(work, 32, [&](int64_t first, int64_t last) {
    for (int64_t w = first; w < last; ++w) append_one(w);
  });
}

}  // namespace clo
