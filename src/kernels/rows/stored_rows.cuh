#pragma once
// Full rows to compressed ones and back, by the rules of ops/stored_row.h to the bit. A row is
// spread over head_dim / 4 neighbouring lanes, 16 bytes of the full row (8 elements) a lane: the
// first half of them have K, the others V. Two rows of head_dim 64 fit a warp.
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/element.cuh"
#include "ops/kv_layout.h"

namespace clo::kernels {

// A lane's part of a compressed row. scale: of its half, kInt8 alone.
struct StoredPiece {
  uint2 codes;
  float scale;
};

__device__ __forceinline__ uint32_t fp8_pair(float first, float second) {
  return __nv_cvt_float2_to_fp8x2(float2{first, second}, __NV_SATFINITE, __NV_E4M3);
}
// Two e4m3 numbers, exact in f16.
__device__ __forceinline__ float2 fp8_values(uint32_t pair) {
  const __half2_raw half =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return __half22float2(__half2(half));
}

// By all lanes of the row together (kHalfLanes = head_dim / 8 of each half).
template <typename Element, int kHalfLanes>
__device__ __forceinline__ StoredPiece compress_piece(RowFormat format, const uint4& full) {
  float x[8];
  const uint32_t words[4] = {full.x, full.y, full.z, full.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Element::unpack(words[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
  StoredPiece stored = {{0, 0}, 0};
  if (format == RowFormat::kFp8) {
    stored.codes.x = fp8_pair(x[0], x[1]) | fp8_pair(x[2], x[3]) << 16;
    stored.codes.y = fp8_pair(x[4], x[5]) | fp8_pair(x[6], x[7]) << 16;
    return stored;
  }
  // As integers magnitudes keep their order, with infinity and NaN above all.
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFFu);
#pragma unroll
  for (int offset = kHalfLanes / 2; offset > 0; offset /= 2) {
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
  }
  const float amax = __uint_as_float(most);
  if (most >= 0x7F800000u) {
    stored.scale = __uint_as_float(0x7FC00000u);
    return stored;
  }
  if (amax < 0x1p-100f) return stored;
  stored.scale = __fdiv_rn(amax, 127.0f);
  const float inverse = __fdiv_rn(127.0f, amax);
  uint32_t code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int rounded = __float2int_rn(__fmul_rn(x[i], inverse));
    code[i] = static_cast<uint32_t>(min(max(rounded, -127), 127)) & 0xFFu;
  }
  stored.codes.x = code[0] | code[1] << 8 | code[2] << 16 | code[3] << 24;
  stored.codes.y = code[4] | code[5] << 8 | code[6] << 16 | code[7] << 24;
  return stored;
}

// Writes a lane's part; `lane`: of the row. The row's lanes together (they tell each other scales);
// lanes of a row without a target pass null.
template <int kHalfLanes>
__device__ __forceinline__ void store_piece(std::byte* row, RowFormat format,
                                            const StoredPiece& stored, int lane) {
  const float value_scale = __shfl_down_sync(0xFFFFFFFFu, stored.scale, kHalfLanes);
  if (row == nullptr || lane >= 2 * kHalfLanes) return;
  *reinterpret_cast<uint2*>(row + 8 * lane) = stored.codes;
  if (format == RowFormat::kInt8 && lane == 0) {
    *reinterpret_cast<uint4*>(row + 16 * kHalfLanes) =
        uint4{__float_as_uint(stored.scale), __float_as_uint(value_scale), 0, 0};
  }
}

// Eight values of a stored row, as the full row has them.
template <typename Element>
__device__ __forceinline__ uint4 expand_piece(RowFormat format, uint2 codes, float scale) {
  uint32_t out[4];
  const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = words[i / 2] >> (16 * (i % 2)) & 0xFFFFu;
    float2 v;
    if (format == RowFormat::kFp8) {
      v = fp8_values(pair);
    } else {
      v.x = __fmul_rn(static_cast<float>(static_cast<int8_t>(pair & 0xFFu)), scale);
      v.y = __fmul_rn(static_cast<float>(static_cast<int8_t>(pair >> 8)), scale);
    }
    out[i] = static_cast<uint32_t>(Element::bits(v.x)) | static_cast<uint32_t>(Element::bits(v.y))
                                                             << 16;
  }
  return {out[0], out[1], out[2], out[3]};
}

// A lane's part of a full row from a stored one; `lane`: of the row.
template <typename Element, int kHalfLanes>
__device__ __forceinline__ uint4 load_expanded(const std::byte* row, RowFormat format, int lane) {
  const uint2 codes = __ldcg(reinterpret_cast<const uint2*>(row + 8 * lane));
  float scale = 0;
  if (format == RowFormat::kInt8) {
    scale =
        __ldcg(reinterpret_cast<const float*>(row + 16 * kHalfLanes) + (lane < kHalfLanes ? 0 : 1));
  }
  return expand_piece<Element>(format, codes, scale);
}

}  // namespace clo::kernels
