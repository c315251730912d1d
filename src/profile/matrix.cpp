#include "profile/matrix.h"

#include <algorithm>

#include "base/check.h"
#include "base/units.h"
#include "reference/simd.h"

namespace clo {

void multiply(const float* a, const float* b, float* c, int64_t m, int64_t k, int64_t n) {
  CLO_CHECK(n % 16 == 0, n);
  // Attention's product of weights and values is this product; it also scales what c held.
  constexpr int64_t kRows = 48;
  constexpr float kForget[kRows] = {};
  const SimdTable& simd = simd_table();
  for (int64_t first = 0; first < m; first += kRows) {
    simd.value_tile(a + first * k, static_cast<int>(std::min(kRows, m - first)),
                    static_cast<int>(k), kForget, b, static_cast<int>(n), c + first * n, n);
  }
}

void transpose(const float* x, int64_t rows, int64_t cols, float* out, int64_t out_stride) {
  // In squares, so that both sides stay in cache.
  constexpr int64_t kSide = 16;
  for (int64_t r0 = 0; r0 < rows; r0 += kSide) {
    const int64_t r1 = std::min(r0 + kSide, rows);
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t r = r0; r < r1; ++r) out[c * out_stride + r] = x[r * cols + c];
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    std::fill(out + c * out_stride + rows, out + (c + 1) * out_stride, 0.0f);
  }
}

int64_t padded_columns(int64_t count) {
  const int64_t columns = round_up(count, 16);
  return columns % 512 == 0 ? columns + 16 : columns;
}

}  // namespace clo
