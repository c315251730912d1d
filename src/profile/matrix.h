#pragma once
// Products of small f32 matrices for measuring and training, by the CPU backend's vector loops.
#include <cstdint>
#include <span>
#include <vector>

namespace clo {

// c = a b: a [m, k], b [k, n], c [m, n], row-major. Requires: n is a multiple of 16; c is finite.
void multiply(const float* a, const float* b, float* c, int64_t m, int64_t k, int64_t n);

// out [cols, out_stride] = the transpose of x [rows, cols]; columns from `rows` on are zero.
void transpose(const float* x, int64_t rows, int64_t cols, float* out, int64_t out_stride);

// A row length of at least `count` for multiply: a multiple of 16, and none of 512, whose columns
// would all meet in the same lines of a cache.
int64_t padded_columns(int64_t count);

}  // namespace clo
