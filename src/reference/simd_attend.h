#pragma once
// Decode attention's loops over token rows of every kind, included through simd_loops.h. K's scale
// multiplies a row's score, V's its weight, so codes meet the products as they are.
#include <cmath>

#include "reference/simd.h"
#include "reference/simd_rows.h"

namespace clo {
namespace {

// One row's lines are asked for while rows before it are read: rows of a set lie anywhere.
CLO_INLINE void prefetch_row(const std::byte* row, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// kRows rows against kGroup queries (in_pairs): enough independent sums to hide the latency of one,
// each row widened once for all queries. sums[g][i] gets the lanes of row i.
template <typename Row, int kGroup, int kRows>
CLO_INLINE void score_rows_block(int head_dim, const std::byte* const* rows, const float* queries,
                                 F8 (&sums)[kGroup][8], int first) {
  F8 acc[kGroup][kRows] = {};
  for (int d = 0; d < head_dim; d += 16) {
    F8 a[kRows], b[kRows];
    for (int i = 0; i < kRows; ++i) Row::load_pair(rows[i] + d * Row::kElement, a[i], b[i]);
    for (int g = 0; g < kGroup; ++g) {
      const F8 q = load8(queries + g * head_dim + d);
      for (int i = 0; i < kRows; ++i) acc[g][i] = acc[g][i] + a[i] * q;
    }
    for (int g = 0; g < kGroup; ++g) {
      const F8 q = load8(queries + g * head_dim + d + 8);
      for (int i = 0; i < kRows; ++i) acc[g][i] = acc[g][i] + b[i] * q;
    }
  }
  for (int g = 0; g < kGroup; ++g) {
    for (int i = 0; i < kRows; ++i) sums[g][first + i] = acc[g][i];
  }
}

// scores[g * kBlockRows + r] for kGroup queries at once. Rows up to `listed` are asked for
// kRowsAhead before they are read.
template <typename Row, int kGroup>
CLO_APART void score_group(int head_dim, const std::byte* const* rows, int count, int listed,
                           const float* queries, float* scores) {
  constexpr int kRows = kGroup >= 4 ? 2 : 4;
  alignas(32) float ordered[kGroup * kMaxHeadDim];
  for (int i = 0; i < kGroup * head_dim; i += 16) {
    F8 a = load8(queries + i), b = load8(queries + i + 8);
    Row::in_pairs(a, b);
    store8(ordered + i, a);
    store8(ordered + i + 8, b);
  }
  for (int r = 0; r < count; r += 8) {
    for (int i = r + kRowsAhead; i < r + kRowsAhead + 8 && i < listed; ++i) {
      prefetch_row(rows[i], 2 * head_dim * Row::kElement + (Row::kHasScales ? 8 : 0));
    }
    F8 sums[kGroup][8];
    const int here = count - r < 8 ? count - r : 8;
    int i = 0;
    for (; i + kRows <= here; i += kRows) {
      score_rows_block<Row, kGroup, kRows>(head_dim, rows + r + i, ordered, sums, i);
    }
    for (; i < here; ++i) {
      score_rows_block<Row, kGroup, 1>(head_dim, rows + r + i, ordered, sums, i);
    }
    for (; i < 8; ++i) {
      for (int g = 0; g < kGroup; ++g) sums[g][i] = F8{};
    }
    for (int g = 0; g < kGroup; ++g) {
      float lanes[8];
      store8(lanes, sum_lanes(sums[g]));
      for (int j = 0; j < here; ++j) scores[g * kBlockRows + r + j] = lanes[j];
    }
  }
}

template <typename Row>
void score_any(int head_dim, int group, const std::byte* const* rows, int count, int listed,
               const float* queries, float* scores) {
  // Once asked for, rows need not be asked for again by the groups that follow.
  int g = 0;
  for (; g + 4 <= group; g += 4, listed = 0) {
    score_group<Row, 4>(head_dim, rows, count, listed, queries + g * head_dim,
                        scores + g * kBlockRows);
  }
  for (; g + 2 <= group; g += 2, listed = 0) {
    score_group<Row, 2>(head_dim, rows, count, listed, queries + g * head_dim,
                        scores + g * kBlockRows);
  }
  for (; g < group; ++g, listed = 0) {
    score_group<Row, 1>(head_dim, rows, count, listed, queries + g * head_dim,
                        scores + g * kBlockRows);
  }
}

// The scales of both halves of a block's rows; up to the next whole vector they are 1.
template <typename Row>
CLO_INLINE void load_scales(int head_dim, const std::byte* const* rows, int count, float* key,
                            float* value) {
  for (int r = 0; r < count; ++r) {
    float scales[2] = {Row::kUnit, Row::kUnit};
    if constexpr (Row::kHasScales) __builtin_memcpy(scales, rows[r] + 2 * head_dim, sizeof scales);
    key[r] = scales[0];
    value[r] = scales[1];
  }
  for (int r = count; r < (count + 7) / 8 * 8; ++r) key[r] = value[r] = 1;
}
CLO_INLINE void multiply_scales(float* x, const float* scales, int count) {
  for (int r = 0; r < count; r += 8) store8(x + r, load8(x + r) * load8(scales + r));
}

void score_rows(RowKind kind, int head_dim, int group, const std::byte* const* rows, int count,
                const float* queries, float* scores) {
  const auto of_kind = [&]<typename Row>() {
    score_any<Row>(head_dim, group, rows, count, 0, queries, scores);
    if constexpr (Row::kScaled) {
      alignas(32) float key_scales[kBlockRows], value_scales[kBlockRows];
      load_scales<Row>(head_dim, rows, count, key_scales, value_scales);
      for (int g = 0; g < group; ++g) multiply_scales(scores + g * kBlockRows, key_scales, count);
    }
  };
  with_row(kind, of_kind);
}

// acc[g] += sum_r weight[g, r] value[r], 8 x kVectors values of the head at a time in registers:
// eight sums or more run side by side, so that no addition waits for the one before. A function of
// its own: inlined into its caller the compiler keeps the sums in memory, at twice the time.
template <typename Row, int kGroup, int kVectors>
CLO_APART void add_values(int head_dim, int first_dim, const std::byte* const* rows, int count,
                          const float* weights, float* acc) {
  F8 sum[kGroup][kVectors];
  for (int g = 0; g < kGroup; ++g) {
    for (int v = 0; v < kVectors; ++v) sum[g][v] = load8(acc + g * head_dim + first_dim + 8 * v);
    for (int v = 0; v < kVectors; v += 2) Row::in_pairs(sum[g][v], sum[g][v + 1]);
  }
  for (int r = 0; r < count; ++r) {
    const std::byte* value = rows[r] + (head_dim + first_dim) * Row::kElement;
    F8 x[kVectors];
    for (int v = 0; v < kVectors; v += 2) {
      Row::load_pair(value + 8 * v * Row::kElement, x[v], x[v + 1]);
    }
    for (int g = 0; g < kGroup; ++g) {
      const F8 w = splat8(weights[g * kBlockRows + r]);
      for (int v = 0; v < kVectors; ++v) sum[g][v] = sum[g][v] + w * x[v];
    }
  }
  for (int g = 0; g < kGroup; ++g) {
    for (int v = 0; v < kVectors; v += 2) Row::from_pairs(sum[g][v], sum[g][v + 1]);
    for (int v = 0; v < kVectors; ++v) store8(acc + g * head_dim + first_dim + 8 * v, sum[g][v]);
  }
}

template <typename Row>
void attend_any(int head_dim, int group, const std::byte* const* rows, int count, int listed,
                const float* queries, float* max, float* sum, float* acc) {
  alignas(32) float scores[kMaxGroup * kBlockRows];
  alignas(32) float key_scales[kBlockRows], value_scales[kBlockRows];
  score_any<Row>(head_dim, group, rows, count, listed, queries, scores);
  if constexpr (Row::kScaled) load_scales<Row>(head_dim, rows, count, key_scales, value_scales);
  for (int g = 0; g < group; ++g) {
    float* s = scores + g * kBlockRows;
    if constexpr (Row::kScaled) multiply_scales(s, key_scales, count);
    for (int r = count; r < (count + 7) / 8 * 8; ++r) s[r] = -INFINITY;
    F8 best8 = splat8(max[g]);
    for (int r = 0; r < count; r += 8) best8 = max8(load8(s + r), best8);
    const float best = max_lane(best8);
    const float lost = max[g] == -INFINITY ? 0.0f : exp8(splat8(max[g] - best))[0];
    F8 total = {};
    for (int r = 0; r < count; r += 8) {
      // A NaN score must stay visible: exp8 would clamp it away.
      const F8 x = load8(s + r) - splat8(best);
      const F8 e = x == x ? exp8(x) : x;
      store8(s + r, e);
      total = total + e;
    }
    sum[g] = sum[g] * lost + sum_lane(total);
    max[g] = best;
    if constexpr (Row::kScaled) multiply_scales(s, value_scales, count);
    for (int d = 0; d < head_dim; d += 8) {
      store8(acc + g * head_dim + d, load8(acc + g * head_dim + d) * splat8(lost));
    }
  }
  int g = 0;
  for (; g + 4 <= group; g += 4) {
    for (int d = 0; d < head_dim; d += 16) {
      add_values<Row, 4, 2>(head_dim, d, rows, count, scores + g * kBlockRows, acc + g * head_dim);
    }
  }
  for (; g < group; g += 2) {
    const bool pair = g + 2 <= group;
    const float* weights = scores + g * kBlockRows;
    float* out = acc + g * head_dim;
    int d = 0;
    for (; d + 32 <= head_dim; d += 32) {
      if (pair) {
        add_values<Row, 2, 4>(head_dim, d, rows, count, weights, out);
      } else {
        add_values<Row, 1, 4>(head_dim, d, rows, count, weights, out);
      }
    }
    for (; d < head_dim; d += 16) {
      if (pair) {
        add_values<Row, 2, 2>(head_dim, d, rows, count, weights, out);
      } else {
        add_values<Row, 1, 2>(head_dim, d, rows, count, weights, out);
      }
    }
  }
}

void attend_rows(RowKind kind, int head_dim, int group, const std::byte* const* rows, int count,
                 int listed, const float* queries, float* max, float* sum, float* acc) {
  const auto of_kind = [&]<typename Row>() {
    attend_any<Row>(head_dim, group, rows, count, listed, queries, max, sum, acc);
  };
  with_row(kind, of_kind);
}

}  // namespace
}  // namespace clo
