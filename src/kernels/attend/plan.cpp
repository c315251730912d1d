#include "base/check.h"
#include "kernels/attend/attend.h"

namespace clo::kernels {

// Numbers of segments run up to (grid - 1) + (heads - 1).
int64_t attend_parts(int32_t grid, int32_t rows, int32_t num_kv_heads) {
  return static_cast<int64_t>(grid) + static_cast<int64_t>(rows) * num_kv_heads;
}

// One block a multiprocessor, where there is room beside a refresh block (256 threads, 48 KB). Two
// smaller ones would double the parts to be merged.
int32_t attend_grid(const KvShape& shape, int32_t num_multiprocessors) {
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  CLO_CHECK(num_multiprocessors > 0, num_multiprocessors);
  return num_multiprocessors;
}

}  // namespace clo::kernels
