// Compiled for x86-64-v4 with VNNI, vectors of 32 bytes, contraction on: see this room's
// CMakeLists.
#include "reference/simd_loops.h"

namespace clo {

const SimdTable& simd_avx512_vnni() {
  static constexpr SimdTable table = make_table("avx512-vnni");
  return table;
}

}  // namespace clo
