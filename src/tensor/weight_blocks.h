#pragma once
// Weights in blocks of 32 inputs that share a scale, as they lie in memory for the CPU's integer
// products. Eight rows (outputs) are packed side by side, so that one vector register holds four
// inputs of each:
//   kInt8  8 f16 scales | 8 x [8 rows][4 inputs] signed bytes; w = scale q, q in [-127, 127]
//   kQ4    8 f16 scales | 8 f16 minima | 4 x [8 rows][4 bytes]; w = scale q + minimum, q in [0,
//   15];
//          byte j of piece v holds input 4 v + j in its low half and 16 + 4 v + j in its high half
// Rows past the last of a matrix are zero.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tensor/dtype.h"

namespace clo {

enum class WeightBlocks : uint8_t { kNone, kInt8, kQ4 };

constexpr std::string_view weight_blocks_name(WeightBlocks blocks) {
  return blocks == WeightBlocks::kInt8 ? "int8" : (blocks == WeightBlocks::kQ4 ? "q4" : "none");
}

inline constexpr int64_t kBlockInputs = 32;
inline constexpr int64_t kGroupRows = 8;

// Bytes of one block of eight rows.
constexpr int64_t block_group_bytes(WeightBlocks blocks) {
  return blocks == WeightBlocks::kQ4 ? 2 * 2 * kGroupRows + kGroupRows * kBlockInputs / 2
                                     : 2 * kGroupRows + kGroupRows * kBlockInputs;
}
// Bytes of a matrix: in blocks, or (kNone) of elements of `type`. Requires for blocks: cols a
// multiple of 32.
constexpr int64_t weight_bytes(WeightBlocks blocks, DType type, int64_t rows, int64_t cols) {
  if (blocks == WeightBlocks::kNone) return rows * cols * dtype_bytes(type);
  return (rows + kGroupRows - 1) / kGroupRows * (cols / kBlockInputs) * block_group_bytes(blocks);
}

// One row before it is packed.
struct BlockRow {
  std::vector<float> scale, minimum;  // [cols / 32], f16 numbers; minimum: of kQ4
  std::vector<int8_t> code;           // [cols]
  void resize(int64_t cols);
  void clear();  // a row of zeros
};

// Nearest codes: kInt8 scales a block by its largest magnitude, kQ4 spans its range.
void quantize_row(WeightBlocks blocks, const float* x, int64_t cols, BlockRow& row);
// Eight rows to `target` [cols / 32] groups.
void pack_rows(WeightBlocks blocks, const BlockRow* rows, int64_t cols, std::byte* target);
// Row `row` of a packed matrix as f32 [cols].
void unpack_row(WeightBlocks blocks, const std::byte* matrix, int64_t cols, int64_t row,
                float* target);

}  // namespace clo
