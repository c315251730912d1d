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
  const std::string_view name = wanted == nullptr ? "" : wanted;
  if (name == "baseline") return simd_baseline();
#if defined(__x86_64__)
  if (name != "avx2" && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")) {
    return simd_avx512_vnni();
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("popcnt")) {
    return simd_avx2();
  }
#endif
  return simd_baseline();
}

}  // namespace clo
