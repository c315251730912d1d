#pragma once
// Weights in blocks of 32 inputs (weight_blocks.h) as a GPU's tensor cores take them: tiles of 16
// outputs, in each of which a lane's share of the left operands of mma.m16n8k16 is contiguous.
//   kInt8  16 x 32 weights: 32 lanes x 16 bytes of codes | 8 x (2 f16 scales): 544 bytes
//   kQ4    16 x 64 weights: 32 lanes x 16 bytes of codes | for each of its two blocks
//                           8 x (2 f16 scales, 2 f16 minima): 640 bytes
// The pairs of scales and minima are those of outputs g and g + 8. Tiles of 16 outputs follow each
// other along the inputs, then along the outputs; what lies past a matrix's edge is zero.
//
// Code of (output r, input c) of a tile, with g = r % 8 and k = c % 16 in step c / 16: lane
// 4 g + k % 8 / 2; operand register p = 2 (k / 8) + r / 8; element k % 2 of it.
//   kInt8  signed byte 8 step + 2 p + element of the lane's 16
//   kQ4    nibble p + 4 element of the lane's word `step`
#include <cstddef>
#include <cstdint>

#include "tensor/weight_blocks.h"

#if defined(__CUDACC__)
#define CLO_TILE_INLINE __host__ __device__ __forceinline__
#else
#define CLO_TILE_INLINE inline
#endif

namespace clo {

inline constexpr int kTileOutputs = 16;
inline constexpr int kTileCodeBytes = 512;

// Inputs of a tile, and its bytes.
CLO_TILE_INLINE constexpr int tile_inputs(WeightBlocks blocks) {
  return blocks == WeightBlocks::kQ4 ? 64 : 32;
}
CLO_TILE_INLINE constexpr int tile_bytes(WeightBlocks blocks) {
  return blocks == WeightBlocks::kQ4 ? kTileCodeBytes + 128 : kTileCodeBytes + 32;
}
// Tiles along the inputs of a matrix; bytes of it all.
CLO_TILE_INLINE constexpr int64_t tiles_across(WeightBlocks blocks, int64_t cols) {
  return (cols + tile_inputs(blocks) - 1) / tile_inputs(blocks);
}
CLO_TILE_INLINE constexpr int64_t tiled_bytes(WeightBlocks blocks, int64_t rows, int64_t cols) {
  return (rows + kTileOutputs - 1) / kTileOutputs * tiles_across(blocks, cols) * tile_bytes(blocks);
}

// Where the code, scale and minimum of (r, c) lie in a tile, 0 <= r < 16, 0 <= c < tile_inputs.
struct TilePlace {
  int byte = 0;     // of the code
  int shift = 0;    // of a nibble in that byte
  int scale = 0;    // byte of the f16 scale
  int minimum = 0;  // byte of the f16 minimum, of kQ4
};
CLO_TILE_INLINE TilePlace tile_place(WeightBlocks blocks, int r, int c) {
  const int g = r % 8, step = c / 16, k = c % 16;
  const int lane = 4 * g + k % 8 / 2, p = 2 * (k / 8) + r / 8, element = k % 2;
  TilePlace place;
  if (blocks == WeightBlocks::kInt8) {
    place.byte = 16 * lane + 8 * step + 2 * p + element;
    place.scale = kTileCodeBytes + 4 * g + 2 * (r / 8);
  } else {
    const int nibble = p + 4 * element;
    place.byte = 16 * lane + 4 * step + nibble / 2;
    place.shift = 4 * (nibble % 2);
    place.scale = kTileCodeBytes + 64 * (c / 32) + 8 * g + 2 * (r / 8);
    place.minimum = place.scale + 4;
  }
  return place;
}

// Sixteen rows [cols] to `target` [tiles_across(blocks, cols)] tiles; the caller clears rows past
// the matrix's last.
void pack_tiles(WeightBlocks blocks, const BlockRow* rows, int64_t cols, std::byte* target);
// Row `row` of a matrix in tiles as f32 [cols].
void unpack_tiled_row(WeightBlocks blocks, const std::byte* matrix, int64_t cols, int64_t row,
                      float* target);

}  // namespace clo
