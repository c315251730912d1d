#pragma once
// Products of weights in blocks (tensor/weight_blocks.h) with activations in 8-bit blocks: integer
// sums of 32 inputs of eight rows at a time, then one multiplication by both scales. Included by
// one source file per instruction set; everything is in an unnamed namespace.
//
// The sum over blocks runs in one chain per output, so an output does not depend on how rows and
// batch were tiled.
#include "reference/simd.h"
#include "reference/simd_vectors.h"
#include "tensor/weight_blocks.h"

namespace clo {
namespace {

// ---- activations ------------------------------------------------------------------------------

// Symmetric: q = round(x / scale), scale = largest magnitude / 127. A block with a number that is
// not finite has a scale of NaN, so that it stays visible.
void quantize_activations(const float* x, int64_t cols, ActivationBlock* out) {
  for (int64_t b = 0; b < cols / kBlockInputs; ++b) {
    const float* in = x + b * kBlockInputs;
    F8 largest = {}, taint = {};
    for (int i = 0; i < kBlockInputs; i += 8) {
      const F8 v = load8(in + i);
      largest = max8(v < 0 ? -v : v, largest);
      taint = taint + v * splat8(0.0f);  // 0, or NaN
    }
    const float magnitude = max_lane(largest);
    float not_finite = 0;
    for (int i = 0; i < 8; ++i) not_finite += taint[i];
    out[b].scale = magnitude / 127 + not_finite;
    const float inverse = magnitude > 0 && not_finite == 0 ? 127 / magnitude : 0.0f;
    int32_t sum = 0;
    for (int i = 0; i < kBlockInputs; i += 8) {
      const F8 magic = splat8(12582912.0f);  // 1.5 * 2^23: rounds to an integer in the low bits
      const F8 rounded = (load8(in + i) * splat8(inverse) + magic) - magic;
      for (int j = 0; j < 8; ++j) {
        const auto code = static_cast<int8_t>(static_cast<int32_t>(rounded[j]));
        out[b].code[i + j] = code;
        sum += code;
      }
    }
    out[b].sum = out[b].scale * static_cast<float>(sum);
  }
}

// ---- eight rows by one block --------------------------------------------------------------------

#if defined(__AVX2__)

typedef __m256i Codes;

CLO_INLINE F8 half8(const std::byte* p) {
  return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CLO_INLINE Codes load_codes(const std::byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
// Four inputs, the same for all rows.
CLO_INLINE Codes four_inputs(const int8_t* p) {
  int32_t four = 0;
  __builtin_memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}

// Sums of 4 unsigned x 4 signed products a row; `low` holds weights in [0, 15].
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
struct NibbleSum {
  __m256i total = _mm256_setzero_si256();
  CLO_INLINE void add(Codes weights, Codes x) { total = _mm256_dpbusd_epi32(total, weights, x); }
  CLO_INLINE F8 value() const { return (F8)_mm256_cvtepi32_ps(total); }
};
struct ByteSum {
  __m256i total = _mm256_setzero_si256();
  CLO_INLINE void add(Codes magnitude, Codes weights, Codes x) {
    total = _mm256_dpbusd_epi32(total, magnitude, _mm256_sign_epi8(x, weights));
  }
  CLO_INLINE F8 value() const { return (F8)_mm256_cvtepi32_ps(total); }
};
#else
struct NibbleSum {
  // Eight additions of at most 2 x 15 x 127 fit 16 bits.
  __m256i pairs = _mm256_setzero_si256();
  CLO_INLINE void add(Codes weights, Codes x) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights, x));
  }
  CLO_INLINE F8 value() const {
    return (F8)_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};
struct ByteSum {
  __m256i total = _mm256_setzero_si256();
  CLO_INLINE void add(Codes magnitude, Codes weights, Codes x) {
    // 2 x 127 x 127 fits 16 bits.
    const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, weights));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  CLO_INLINE F8 value() const { return (F8)_mm256_cvtepi32_ps(total); }
};
#endif

template <int kBatch>
CLO_INLINE void block_of_q4(const std::byte* w, const ActivationBlock* const* x, int64_t b,
                            F8 (&acc)[kBatch]) {
  const F8 scale = half8(w), minimum = half8(w + 16);
  const Codes mask = _mm256_set1_epi8(15);
  NibbleSum sum[kBatch];
  for (int v = 0; v < 4; ++v) {
    const Codes both = load_codes(w + 32 + 32 * v);
    const Codes low = _mm256_and_si256(both, mask);
    const Codes high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    for (int i = 0; i < kBatch; ++i) {
      sum[i].add(low, four_inputs(x[i][b].code + 4 * v));
      sum[i].add(high, four_inputs(x[i][b].code + 16 + 4 * v));
    }
  }
  for (int i = 0; i < kBatch; ++i) {
    acc[i] = acc[i] + sum[i].value() * (scale * splat8(x[i][b].scale));
    acc[i] = acc[i] + minimum * splat8(x[i][b].sum);
  }
}

template <int kBatch>
CLO_INLINE void block_of_int8(const std::byte* w, const ActivationBlock* const* x, int64_t b,
                              F8 (&acc)[kBatch]) {
  const F8 scale = half8(w);
  ByteSum sum[kBatch];
  for (int v = 0; v < 8; ++v) {
    const Codes weights = load_codes(w + 16 + 32 * v);
    const Codes magnitude = _mm256_abs_epi8(weights);
    for (int i = 0; i < kBatch; ++i) {
      sum[i].add(magnitude, weights, four_inputs(x[i][b].code + 4 * v));
    }
  }
  for (int i = 0; i < kBatch; ++i) {
    acc[i] = acc[i] + sum[i].value() * (scale * splat8(x[i][b].scale));
  }
}

#else  // no AVX2

CLO_INLINE float half_at(const std::byte* p) {
  uint16_t bits = 0;
  __builtin_memcpy(&bits, p, sizeof bits);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
  uint32_t wide = 0;
  if (exponent == 0) {  // zero, or a subnormal number: mantissa x 2^-24
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    __builtin_memcpy(&wide, &value, sizeof wide);
  } else {
    wide = ((exponent == 31 ? 255 : exponent + 112) << 23) | mantissa << 13;
  }
  wide |= sign;
  float value = 0;
  __builtin_memcpy(&value, &wide, sizeof value);
  return value;
}

template <int kBatch>
CLO_INLINE void block_of_q4(const std::byte* w, const ActivationBlock* const* x, int64_t b,
                            F8 (&acc)[kBatch]) {
  const auto* codes = reinterpret_cast<const uint8_t*>(w + 32);
  for (int i = 0; i < kBatch; ++i) {
    const ActivationBlock& in = x[i][b];
    for (int r = 0; r < 8; ++r) {
      int32_t sum = 0;
      for (int k = 0; k < 16; ++k) {
        const uint8_t both = codes[k / 4 * 32 + 4 * r + k % 4];
        sum += (both & 15) * in.code[k] + (both >> 4) * in.code[16 + k];
      }
      acc[i][r] += static_cast<float>(sum) * (half_at(w + 2 * r) * in.scale);
      acc[i][r] += half_at(w + 16 + 2 * r) * in.sum;
    }
  }
}

template <int kBatch>
CLO_INLINE void block_of_int8(const std::byte* w, const ActivationBlock* const* x, int64_t b,
                              F8 (&acc)[kBatch]) {
  const auto* codes = reinterpret_cast<const int8_t*>(w + 16);
  for (int i = 0; i < kBatch; ++i) {
    const ActivationBlock& in = x[i][b];
    for (int r = 0; r < 8; ++r) {
      int32_t sum = 0;
      for (int k = 0; k < 32; ++k) sum += codes[k / 4 * 32 + 4 * r + k % 4] * in.code[k];
      acc[i][r] += static_cast<float>(sum) * (half_at(w + 2 * r) * in.scale);
    }
  }
}

#endif

// Bytes ahead of the weights being read at which the next are asked for.
constexpr int64_t kBlocksAhead = 2048;

// ---- products -----------------------------------------------------------------------------------

template <WeightBlocks kBlocks, int kBatch>
CLO_INLINE void block_group(const std::byte* group, int64_t num_blocks,
                            const ActivationBlock* const* x, F8 (&acc)[kBatch]) {
  constexpr int64_t kBytesEach = block_group_bytes(kBlocks);
  for (int64_t b = 0; b < num_blocks; ++b) {
    const std::byte* w = group + b * kBytesEach;
    for (int64_t at = 0; at < kBytesEach; at += 64) __builtin_prefetch(w + kBlocksAhead + at);
    if constexpr (kBlocks == WeightBlocks::kQ4) {
      block_of_q4<kBatch>(w, x, b, acc);
    } else {
      block_of_int8<kBatch>(w, x, b, acc);
    }
  }
}

template <WeightBlocks kBlocks, int kBatch>
CLO_APART void block_rows(const BlockProduct& p, int64_t group, int64_t first_x) {
  const int64_t num_blocks = p.cols / kBlockInputs;
  const ActivationBlock* x[kBatch];
  for (int i = 0; i < kBatch; ++i) x[i] = p.x + (first_x + i) * num_blocks;
  F8 acc[kBatch] = {};
  block_group<kBlocks, kBatch>(p.weight + group * num_blocks * block_group_bytes(kBlocks),
                               num_blocks, x, acc);
  const int64_t row = group * kGroupRows;
  const int64_t here = p.rows - row < kGroupRows ? p.rows - row : kGroupRows;
  for (int i = 0; i < kBatch; ++i) {
    float* out = p.out + (first_x + i) * p.out_stride + row;
    for (int64_t r = 0; r < here; ++r) {
      float value = acc[i][r];
      if (p.bias != nullptr) value += p.bias[row + r];
      out[r] = p.accumulate ? out[r] + value : value;
    }
  }
}

template <WeightBlocks kBlocks>
void block_groups(const BlockProduct& p, int64_t first, int64_t last) {
  for (int64_t group = first; group < last; ++group) {
    int64_t i = 0;
    for (; i + 4 <= p.batch; i += 4) block_rows<kBlocks, 4>(p, group, i);
    if (i + 2 <= p.batch) {
      block_rows<kBlocks, 2>(p, group, i);
      i += 2;
    }
    if (i < p.batch) block_rows<kBlocks, 1>(p, group, i);
  }
}

void linear_blocks(const BlockProduct& p, int64_t first, int64_t last) {
  if (p.blocks == WeightBlocks::kQ4) {
    block_groups<WeightBlocks::kQ4>(p, first, last);
  } else {
    block_groups<WeightBlocks::kInt8>(p, first, last);
  }
}

}  // namespace
}  // namespace clo
