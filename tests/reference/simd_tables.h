#pragma once
// The tables of vector loops that this processor can run, the plain one first.
#include <vector>

#include "reference/simd.h"

namespace clo {

inline std::vector<const SimdTable*> tables() {
  std::vector<const SimdTable*> all = {&simd_baseline()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    all.push_back(&simd_avx2());
  }
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl")) {
    all.push_back(&simd_avx512_vnni());
  }
#endif
  return all;
}

}  // namespace clo
