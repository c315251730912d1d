#pragma once
// Compressed token rows: the rounding rules, in plain loops. Every backend gives the same bytes.
//
// What is rounded are the values of the full row, so first to KvShape::type.
//
// int8, each half (K, V) for itself, all in f32:
//   a NaN or an infinity in it   scale is NaN (0x7FC00000), codes are 0: what reads it is NaN
//   amax = max |x| < 2^-100      scale and codes are 0 (127 / amax must not overflow)
//   otherwise                    scale = amax / 127, inverse = 127 / amax,
//                                code = rint(x * inverse), ties to even, within [-127, 127]
//   value = code * scale
// fp8: e4m3 as f32_to_e4m3 rounds it; no scale. Infinities saturate with all else beyond 448.
//
// Padding is zero.
#include <cstddef>

#include "ops/kv_layout.h"

namespace clo {

// Requires of all: shape.compressed().

// key, value: [head_dim] values of the full row; stored: [stored_row_bytes()].
void compress_row(const KvShape& shape, const float* key, const float* value, std::byte* stored);
// The values of a stored row: key, value [head_dim].
void expand_row(const KvShape& shape, const std::byte* stored, float* key, float* value);
// The full row [row_bytes()] that a stored row becomes: its values, rounded to KvShape::type.
void expand_to_full(const KvShape& shape, const std::byte* stored, std::byte* full);

}  // namespace clo
