#pragma once
// f16 numbers among bytes of any alignment, as scales lie beside codes.
#include <cstddef>
#include <cstring>

#include "tensor/dtype.h"

namespace clo {

inline void put_half(std::byte* at, float value) {
  const uint16_t bits = f32_to_f16(value);
  std::memcpy(at, &bits, sizeof bits);
}
inline float get_half(const std::byte* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return f16_to_f32(bits);
}

}  // namespace clo
