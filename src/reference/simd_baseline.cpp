#include <cstdlib>
#include <string_view>

#include "reference/simd_loops.h"

namespace clo {

const SimdTable& simd_baseline() {
  static constexpr SimdTable table = make_table("baseline");
  return table;
}

const SimdTable& simd_table() {
  const char* wanted = std::getenv("CLO_SIMD");
  if (wanted != nullptr && std::string_view(wanted) == "baseline") return simd_baseline();
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("popcnt")) {
    return simd_avx2();
  }
#endif
  return simd_baseline();
}

}  // namespace clo
