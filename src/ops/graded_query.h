#pragma once
// How a graded query asks the codes of keys (Select::kGradedHash). A key's code is the signs of its
// projection, but the query's projection v [bits] keeps its size: a key whose bit j is not the sign
// of v_j is farther by a weight that grows with |v_j|. With queries of a group added up before they
// are projected, v is what all of them want together. The distance is the sum of the weights of
// the bits that differ: whole numbers, so every backend counts the same.
#include <cstdint>

#include "base/host_device.h"
#include "ops/code_limits.h"

namespace clo {

// The largest weight of a bit: 7, or less where codes are so long that distances would be too many.
CLO_HOST_DEVICE int32_t most_bit_weight(int32_t bits) {
  const int32_t most = kMostDistance / bits;
  return most < (1 << kWeightPlanes) - 1 ? most : (1 << kWeightPlanes) - 1;
}

// Weights rise in even steps: the nearest whole number to (most + 1) |v| over the largest |v| of
// the code, and no more than `most`, which is reached at 13/16 of it (for 7). As good as steps by
// the root mean square, and without sums, whose order backends would have to share. `steps`:
// weight_steps().
CLO_HOST_DEVICE float weight_steps(int32_t most, float largest) {
  return static_cast<float>(most + 1) / largest;
}
CLO_HOST_DEVICE int32_t bit_weight(float size, float steps, int32_t most) {
#if defined(__CUDA_ARCH__)
  const float x = __fadd_rn(__fmul_rn(size, steps), 0.5f);
#else
  const float scaled = size * steps;
  const float x = scaled + 0.5f;
#endif
  // Numbers that are not finite weigh nothing.
  if (!(x >= 1)) return 0;
  return x < static_cast<float>(most) ? static_cast<int32_t>(x) : most;
}

}  // namespace clo
