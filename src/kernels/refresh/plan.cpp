#include "kernels/refresh/refresh.h"

namespace clo::kernels {

int64_t refresh_scratch_bytes(int64_t max_capacity_tokens) {
  const int64_t pages = (max_capacity_tokens + kPageTokens - 1) / kPageTokens;
  return (pages > 0 ? pages : 1) * kPageTokens * kRefreshScratchTokenBytes;
}

}  // namespace clo::kernels
