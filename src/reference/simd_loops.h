#pragma once
// The bodies of SimdTable's loops, included by one source file per instruction set. Everything is
// in an unnamed namespace and nothing but plain C headers is used, so that no code compiled for a
// newer processor can end up in a function that an older one runs.
#include <cmath>
#include <cstring>

#include "ops/code_limits.h"
#include "reference/simd.h"
#include "reference/simd_attend.h"
#include "reference/simd_blocks.h"
#include "reference/simd_vectors.h"

namespace clo {
namespace {

// The function of an element type.
template <typename Function>
CLO_INLINE Function* pick(DType type, Function* f32, Function* f16, Function* bf16) {
  return type == DType::kF32 ? f32 : (type == DType::kF16 ? f16 : bf16);
}

// ---- linear -------------------------------------------------------------------------------

// Bytes ahead of the weights being read at which the next are asked for. The processor's own
// prefetcher follows the stream too late: with weights in memory, rather than in a cache, this
// makes the loop half as fast again (Skylake, 2 and 8 KiB measured equal or worse).
constexpr int64_t kWeightsAhead = 4096;

// kRows rows of the weight against kBatch rows of x. One chain of eight lanes per output, so an
// output does not depend on how rows and batch were tiled.
template <DType T, int kRows, int kBatch>
CLO_INLINE void linear_tile(const std::byte* weight, int64_t cols, const float* x, float* sums) {
  F8 acc[kRows][kBatch] = {};
  const int64_t whole = cols / 8 * 8;
  // The side with fewer vectors is held, the other passes through one register: sixteen are enough
  // for twelve sums.
  for (int64_t c = 0; c < whole; c += 8) {
    for (int at = 0; at < 8 * kRows * kBytes<T>; at += 64) {
      __builtin_prefetch(weight + c * kRows * kBytes<T> + kWeightsAhead + at);
    }
    if constexpr (kRows < kBatch) {
      F8 w[kRows];
      for (int r = 0; r < kRows; ++r) w[r] = load8_as<T>(weight + (r * cols + c) * kBytes<T>);
      for (int b = 0; b < kBatch; ++b) {
        const F8 xv = load8(x + b * cols + c);
        for (int r = 0; r < kRows; ++r) acc[r][b] = acc[r][b] + w[r] * xv;
      }
    } else {
      F8 xv[kBatch];
      for (int b = 0; b < kBatch; ++b) xv[b] = load8(x + b * cols + c);
      for (int r = 0; r < kRows; ++r) {
        const F8 w = load8_as<T>(weight + (r * cols + c) * kBytes<T>);
        for (int b = 0; b < kBatch; ++b) acc[r][b] = acc[r][b] + w * xv[b];
      }
    }
  }
  // Eight sums cost what one costs; the tree is the same, and so is each result.
  constexpr int kSums = kRows * kBatch;
  for (int first = 0; first < kSums; first += 8) {
    F8 flat[8] = {};
    for (int i = first; i < kSums && i < first + 8; ++i) {
      flat[i - first] = acc[i / kBatch][i % kBatch];
    }
    store8(sums + first, sum_lanes(flat));
  }
  for (int r = 0; r < kRows && whole < cols; ++r) {
    for (int b = 0; b < kBatch; ++b) {
      for (int64_t c = whole; c < cols; ++c) {
        sums[r * kBatch + b] +=
            load_one_as<T>(weight + (r * cols + c) * kBytes<T>) * x[b * cols + c];
      }
    }
  }
}

template <DType T, int kRows, int kBatch>
CLO_INLINE void linear_block(const std::byte* weight, int64_t cols, int64_t n, const float* x,
                             int64_t b, const float* bias, float* out, int64_t out_stride,
                             bool accumulate) {
  float sums[(kRows * kBatch + 7) / 8 * 8];
  linear_tile<T, kRows, kBatch>(weight + n * cols * kBytes<T>, cols, x + b * cols, sums);
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kBatch; ++i) {
      float value = sums[r * kBatch + i];
      if (bias != nullptr) value += bias[n + r];
      float* target = out + (b + i) * out_stride + n + r;
      *target = accumulate ? *target + value : value;
    }
  }
}

template <DType T>
void linear_rows(const std::byte* weight, int64_t cols, int64_t first, int64_t last, const float* x,
                 int64_t batch, const float* bias, float* out, int64_t out_stride,
                 bool accumulate) {
  // Three rows by four of x are twelve sums, which hide the latency of an addition twice over and
  // widen each weight for four products. What is left of the batch takes tiles of as many rows as
  // make eight sums.
#define CLO_ARGS weight, cols, n, x, b, bias, out, out_stride, accumulate
  const int64_t fours = batch / 4 * 4;
  int64_t n = first;
  for (; n + 3 <= last && fours > 0; n += 3) {
    for (int64_t b = 0; b < fours; b += 4) linear_block<T, 3, 4>(CLO_ARGS);
  }
  for (; n < last; ++n) {
    for (int64_t b = 0; b < fours; b += 4) linear_block<T, 1, 4>(CLO_ARGS);
  }
  int64_t b = fours;
  if (b + 2 <= batch) {
    for (n = first; n + 4 <= last; n += 4) linear_block<T, 4, 2>(CLO_ARGS);
    for (; n < last; ++n) linear_block<T, 1, 2>(CLO_ARGS);
    b += 2;
  }
  if (b < batch) {
    for (n = first; n + 8 <= last; n += 8) linear_block<T, 8, 1>(CLO_ARGS);
    for (; n < last; ++n) linear_block<T, 1, 1>(CLO_ARGS);
  }
#undef CLO_ARGS
}

void linear(DType type, const std::byte* weight, int64_t cols, int64_t first, int64_t last,
            const float* x, int64_t batch, const float* bias, float* out, int64_t out_stride,
            bool accumulate) {
  const auto of_type =
      pick(type, linear_rows<DType::kF32>, linear_rows<DType::kF16>, linear_rows<DType::kBF16>);
  of_type(weight, cols, first, last, x, batch, bias, out, out_stride, accumulate);
}

// ---- conversion -----------------------------------------------------------------------------

void to_f32(DType type, const std::byte* source, float* target, int64_t count) {
  if (type == DType::kF32) {
    std::memcpy(target, source, static_cast<size_t>(count) * 4);
    return;
  }
  const auto widen = [&]<DType T>() {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) store8(target + i, load8_as<T>(source + 2 * i));
    for (; i < count; ++i) target[i] = load_one_as<T>(source + 2 * i);
  };
  type == DType::kF16 ? widen.template operator()<DType::kF16>()
                      : widen.template operator()<DType::kBF16>();
}

void widen_row(RowKind kind, const std::byte* row, int head_dim, float* key, float* value) {
  const auto of_kind = [&]<typename Row>() {
    float scales[2] = {Row::kUnit, Row::kUnit};
    if constexpr (Row::kHasScales) __builtin_memcpy(scales, row + 2 * head_dim, sizeof scales);
    for (int half = 0; half < 2; ++half) {
      const std::byte* source = row + half * head_dim * Row::kElement;
      float* target = half == 0 ? key : value;
      for (int d = 0; d < head_dim; d += 16) {
        F8 a, b;
        Row::load_pair(source + d * Row::kElement, a, b);
        Row::from_pairs(a, b);
        if constexpr (Row::kScaled) {
          a = a * splat8(scales[half]);
          b = b * splat8(scales[half]);
        }
        store8(target + d, a);
        store8(target + d + 8, b);
      }
    }
  };
  with_row(kind, of_kind);
}

void from_f32(DType type, const float* source, std::byte* target, int64_t count) {
  if (type == DType::kF32) {
    std::memcpy(target, source, static_cast<size_t>(count) * 4);
    return;
  }
  if (type == DType::kF16) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) store8_f16(target + 2 * i, load8(source + i));
    for (; i < count; ++i) {
      const uint16_t half = f32_to_f16(source[i]);
      __builtin_memcpy(target + 2 * i, &half, 2);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    __builtin_memcpy(&bits, source + i, 4);
    const uint32_t rounded = (bits & 0x7FFFFFFFu) > 0x7F800000u
                                 ? bits | 0x400000u
                                 : bits + 0x7FFFu + ((bits >> 16) & 1u);
    const auto half = static_cast<uint16_t>(rounded >> 16);
    __builtin_memcpy(target + 2 * i, &half, 2);
  }
}

// ---- prefill attention ------------------------------------------------------------------------

// Six query rows by sixteen keys: twelve accumulators, the most that sixteen registers allow.
template <int kRows>
CLO_INLINE void score_block(const float* queries, int64_t stride, const float* strip, int head_dim,
                            float scale, float* scores, int keys) {
  F8 acc[kRows][2] = {};
  for (int d = 0; d < head_dim; ++d) {
    const F8 k0 = load8(strip + d * kStripKeys);
    const F8 k1 = load8(strip + d * kStripKeys + 8);
    for (int r = 0; r < kRows; ++r) {
      const F8 q = splat8(queries[r * stride + d]);
      acc[r][0] = acc[r][0] + q * k0;
      acc[r][1] = acc[r][1] + q * k1;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store8(scores + r * keys, acc[r][0] * splat8(scale));
    store8(scores + r * keys + 8, acc[r][1] * splat8(scale));
  }
}

void score_tile(const float* queries, int64_t stride, int rows, const float* packed_keys,
                int head_dim, int keys, float scale, float* scores) {
  for (int c = 0; c < keys; c += kStripKeys) {
    const float* strip = packed_keys + static_cast<int64_t>(c) * head_dim;
    int r = 0;
    for (; r + 6 <= rows; r += 6) {
      score_block<6>(queries + r * stride, stride, strip, head_dim, scale, scores + r * keys + c,
                     keys);
    }
    for (; r < rows; ++r) {
      score_block<1>(queries + r * stride, stride, strip, head_dim, scale, scores + r * keys + c,
                     keys);
    }
  }
}

void softmax_tile(float* scores, int rows, int keys, const int* limit, float* max, float* sum,
                  float* rescale) {
  for (int r = 0; r < rows; ++r) {
    float* s = scores + static_cast<int64_t>(r) * keys;
    for (int c = limit[r] < 0 ? 0 : limit[r]; c < keys; ++c) s[c] = -INFINITY;
    if (limit[r] <= 0) {
      std::memset(s, 0, sizeof(float) * static_cast<size_t>(keys));
      rescale[r] = 1;
      continue;
    }
    F8 best8 = load8(s);
    for (int c = 8; c < keys; c += 8) best8 = max8(load8(s + c), best8);
    float best = max_lane(best8);
    if (max[r] > best) best = max[r];
    F8 total = {};
    for (int c = 0; c < keys; c += 8) {
      const F8 x = load8(s + c) - splat8(best);
      const F8 e = x == x ? exp8(x) : x;
      store8(s + c, e);
      total = total + e;
    }
    rescale[r] = max[r] == -INFINITY ? 0.0f : exp8(splat8(max[r] - best))[0];
    sum[r] = sum[r] * rescale[r] + sum_lane(total);
    max[r] = best;
  }
}

template <int kRows>
CLO_INLINE void value_block(const float* weights, int keys, const float* rescale,
                            const float* values, int head_dim, float* out, int64_t out_stride) {
  F8 acc[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = load8(out + r * out_stride) * splat8(rescale[r]);
    acc[r][1] = load8(out + r * out_stride + 8) * splat8(rescale[r]);
  }
  for (int c = 0; c < keys; ++c) {
    const F8 v0 = load8(values + static_cast<int64_t>(c) * head_dim);
    const F8 v1 = load8(values + static_cast<int64_t>(c) * head_dim + 8);
    for (int r = 0; r < kRows; ++r) {
      const F8 w = splat8(weights[r * keys + c]);
      acc[r][0] = acc[r][0] + w * v0;
      acc[r][1] = acc[r][1] + w * v1;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store8(out + r * out_stride, acc[r][0]);
    store8(out + r * out_stride + 8, acc[r][1]);
  }
}

void value_tile(const float* weights, int rows, int keys, const float* rescale, const float* values,
                int head_dim, float* out, int64_t out_stride) {
  for (int d = 0; d < head_dim; d += 16) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) {
      value_block<6>(weights + r * keys, keys, rescale + r, values + d, head_dim,
                     out + r * out_stride + d, out_stride);
    }
    for (; r < rows; ++r) {
      value_block<1>(weights + r * keys, keys, rescale + r, values + d, head_dim,
                     out + r * out_stride + d, out_stride);
    }
  }
}

// ---- codes --------------------------------------------------------------------------------------

template <int kWords>
CLO_INLINE void hamming_words(const uint64_t* codes, int64_t count, const uint64_t* queries,
                              int group, uint16_t* distances, uint32_t* histogram) {
  for (int64_t t = 0; t < count; ++t) {
    int64_t distance = 0;
    for (int g = 0; g < group; ++g) {
      for (int w = 0; w < kWords; ++w) {
        distance += __builtin_popcountll(codes[t * kWords + w] ^ queries[g * kWords + w]);
      }
    }
    distances[t] = static_cast<uint16_t>(distance);
    ++histogram[distance];
  }
}

void hamming(const uint64_t* codes, int words, int64_t count, const uint64_t* queries, int group,
             uint16_t* distances, uint32_t* histogram) {
  if (words == 2 && group == 2) {
    hamming_words<2>(codes, count, queries, 2, distances, histogram);
  } else if (words == 2) {
    hamming_words<2>(codes, count, queries, group, distances, histogram);
  } else if (words == 1) {
    hamming_words<1>(codes, count, queries, group, distances, histogram);
  } else if (words == 4) {
    hamming_words<4>(codes, count, queries, group, distances, histogram);
  } else {
    for (int64_t t = 0; t < count; ++t) {
      int64_t distance = 0;
      for (int g = 0; g < group; ++g) {
        for (int w = 0; w < words; ++w) {
          distance += __builtin_popcountll(codes[t * words + w] ^ queries[g * words + w]);
        }
      }
      distances[t] = static_cast<uint16_t>(distance);
      ++histogram[distance];
    }
  }
}

template <int kWords>
CLO_INLINE void graded_words(const uint64_t* codes, int words, int64_t count, const uint64_t* signs,
                             const uint64_t* planes, uint16_t* distances, uint32_t* histogram) {
  if constexpr (kWords > 0) words = kWords;
  for (int64_t t = 0; t < count; ++t) {
    int64_t distance = 0;
    for (int w = 0; w < words; ++w) {
      const uint64_t differs = codes[t * words + w] ^ signs[w];
      for (int p = 0; p < kWeightPlanes; ++p) {
        distance += int64_t{__builtin_popcountll(differs & planes[p * words + w])} << p;
      }
    }
    distances[t] = static_cast<uint16_t>(distance);
    ++histogram[distance];
  }
}

void graded(const uint64_t* codes, int words, int64_t count, const uint64_t* signs,
            const uint64_t* planes, uint16_t* distances, uint32_t* histogram) {
  if (words == 1) {
    graded_words<1>(codes, words, count, signs, planes, distances, histogram);
  } else if (words == 2) {
    graded_words<2>(codes, words, count, signs, planes, distances, histogram);
  } else if (words == 4) {
    graded_words<4>(codes, words, count, signs, planes, distances, histogram);
  } else {
    graded_words<0>(codes, words, count, signs, planes, distances, histogram);
  }
}

// ---- small loops --------------------------------------------------------------------------------

void gated_silu(const float* gate, const float* up, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const F8 g = load8(gate + i);
    // exp of a non-positive number only: silu(g) = g / (1 + e^-|g|) x (e^-|g| when g < 0).
    const F8 e = exp8(g < 0 ? g : -g);
    const F8 sigmoid = (g < 0 ? e : splat8(1.0f)) / (splat8(1.0f) + e);
    store8(out + i, (g == g ? g * sigmoid : g) * load8(up + i));
  }
  for (; i < count; ++i) {
    const float g = gate[i];
    out[i] = g / (1.0f + __builtin_expf(-g)) * up[i];
  }
}

void hadamard(float* x, const uint32_t* signs, int width) {
  for (int i = 0; i < width; i += 8) {
    const uint32_t byte = signs[i / 32] >> (i % 32);
    const U8 bits = U8{byte, byte, byte, byte, byte, byte, byte, byte} &
                    U8{1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u};
    const U8 flips = (U8)(bits != 0) & 0x80000000u;
    store8(x + i, (F8)((U8)load8(x + i) ^ flips));
  }
  for (int half = width / 2; half >= 8; half /= 2) {
    for (int base = 0; base < width; base += 2 * half) {
      for (int i = 0; i < half; i += 8) {
        const F8 a = load8(x + base + i), b = load8(x + base + half + i);
        store8(x + base + i, a + b);
        store8(x + base + half + i, a - b);
      }
    }
  }
  for (int i = 0; i < width; i += 8) {
    F8 v = load8(x + i);
    F8 s = __builtin_shuffle(v, I8{4, 5, 6, 7, 0, 1, 2, 3});
    v = s + (F8)((U8)v ^ U8{0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31});
    s = __builtin_shuffle(v, I8{2, 3, 0, 1, 6, 7, 4, 5});
    v = s + (F8)((U8)v ^ U8{0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31});
    s = __builtin_shuffle(v, I8{1, 0, 3, 2, 5, 4, 7, 6});
    v = s + (F8)((U8)v ^ U8{0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31});
    store8(x + i, v);
  }
}

constexpr SimdTable make_table(const char* name) {
  return SimdTable{name,       linear,     linear_blocks, quantize_activations,
                   to_f32,     from_f32,   widen_row,     attend_rows,
                   score_rows, score_tile, softmax_tile,  value_tile,
                   hamming,    graded,     gated_silu,    hadamard};
}

}  // namespace
}  // namespace clo
