#pragma once
// How the tiles of a launch are dealt to its blocks: one line of tiles, all heads one after
// another, cut into runs whose lengths differ by at most one. Pure arithmetic, for host and device.
//
// A run may cross heads and a head may span runs. The share of one head in one run is a segment;
// walking the line, each next segment has the next block, the next head or both, so
// block + head numbers segments without gaps inside a head and without clashes.
#include <cstdint>

#include "base/host_device.h"

namespace clo::kernels {

// Rows of a tile: the token side of one tensor-core product, the work of one warp at a time.
inline constexpr int32_t kTileRows = 16;

CLO_HOST_DEVICE int32_t tiles_of(int32_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// Blocks that take part: no run is empty, so that a head's parts are consecutive blocks.
CLO_HOST_DEVICE int32_t dealing_blocks(int32_t total, int32_t grid) {
  return total < grid ? total : grid;
}
// First tile of a block's run, and one past its last for block + 1: the first blocks take one more.
// (32-bit divisions only; a 64-bit one is a call on the device.)
CLO_HOST_DEVICE int32_t first_tile(int32_t total, int32_t block, int32_t blocks) {
  const int32_t longer = total % blocks;
  return block * (total / blocks) + (block < longer ? block : longer);
}
// The block whose run holds `tile`.
CLO_HOST_DEVICE int32_t block_of_tile(int32_t total, int32_t tile, int32_t blocks) {
  const int32_t length = total / blocks, longer = total % blocks;
  const int32_t in_longer = longer * (length + 1);
  return tile < in_longer ? tile / (length + 1) : longer + (tile - in_longer) / length;
}

}  // namespace clo::kernels
