// Compiled for x86-64-v3 (AVX2, FMA, POPCNT) with contraction on: see this room's CMakeLists.
#include "reference/simd_loops.h"

namespace clo {

const SimdTable& simd_avx2() {
  static constexpr SimdTable table = make_table("avx2");
  return table;
}

}  // namespace clo
