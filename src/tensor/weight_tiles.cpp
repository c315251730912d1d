#include "tensor/weight_tiles.h"

#include <cstring>

#include "tensor/half_bytes.h"

namespace clo {

void pack_tiles(WeightBlocks blocks, const BlockRow* rows, int64_t cols, std::byte* target) {
  const int width = tile_inputs(blocks), bytes = tile_bytes(blocks);
  std::memset(target, 0, static_cast<size_t>(tiles_across(blocks, cols) * bytes));
  for (int64_t first = 0; first < cols; first += width, target += bytes) {
    for (int r = 0; r < kTileOutputs; ++r) {
      const BlockRow& row = rows[r];
      for (int c = 0; c < width && first + c < cols; ++c) {
        const TilePlace place = tile_place(blocks, r, c);
        const auto code = static_cast<uint8_t>(row.code[static_cast<size_t>(first + c)]);
        target[place.byte] |= static_cast<std::byte>(code << place.shift);
        if (c % kBlockInputs != 0) continue;
        const auto block = static_cast<size_t>((first + c) / kBlockInputs);
        put_half(target + place.scale, row.scale[block]);
        if (blocks == WeightBlocks::kQ4) put_half(target + place.minimum, row.minimum[block]);
      }
    }
  }
}

void unpack_tiled_row(WeightBlocks blocks, const std::byte* matrix, int64_t cols, int64_t row,
                      float* target) {
  const int width = tile_inputs(blocks);
  const std::byte* tile =
      matrix + row / kTileOutputs * tiles_across(blocks, cols) * tile_bytes(blocks);
  for (int64_t c = 0; c < cols; ++c) {
    const std::byte* of_tile = tile + c / width * tile_bytes(blocks);
    const TilePlace place =
        tile_place(blocks, static_cast<int>(row % kTileOutputs), static_cast<int>(c % width));
    const float scale = get_half(of_tile + place.scale);
    if (blocks == WeightBlocks::kInt8) {
      target[c] = scale * static_cast<float>(static_cast<int8_t>(of_tile[place.byte]));
    } else {
      const int code = std::to_integer<int>(of_tile[place.byte]) >> place.shift & 15;
      target[c] = scale * static_cast<float>(code) + get_half(of_tile + place.minimum);
    }
  }
}

}  // namespace clo
