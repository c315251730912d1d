#pragma once
// Limits of key codes. Constants alone: loops that are compiled for newer processors include it.
#include <cstdint>

namespace clo {

inline constexpr int32_t kMaxCodeBits = 512;  // of a key
inline constexpr int kWeightPlanes = 3;       // bits of the weight that a query gives a key's bit
inline constexpr int kMostDistance = 2048;    // of a graded query

}  // namespace clo
