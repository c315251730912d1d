#pragma once
// Element types of a GGUF file: how long their blocks are, and what numbers they stand for. Formats
// and arithmetic as ggml defines them; results equal the reference's (the gguf package) bit for
// bit.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tensor/weight_blocks.h"

namespace clo {

// Numbers as in the file.
enum class GgmlType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBF16 = 30,
};

struct GgmlTypeInfo {
  GgmlType type;
  std::string_view name;
  int64_t block_elements;
  int64_t block_bytes;
};
// Null for a type that is not read here; see ggml_type_name().
const GgmlTypeInfo* ggml_type_info(uint32_t type);
// Also of types that are not read: "IQ2_XS", or "type 77" of one that is unknown.
std::string ggml_type_name(uint32_t type);

// `count` elements to f32. source: whole blocks, any alignment. Requires: count a multiple of the
// block.
void dequantize(GgmlType type, const std::byte* source, float* target, int64_t count);

// The blocks in which matrices of these types are kept as they are, or with the least loss: kQ4 for
// four bits with a scale and a minimum, kInt8 for the rest, kNone where one is not quantised.
WeightBlocks blocks_for(std::span<const GgmlType> types);
// A row of `cols` elements in blocks, without going through its numbers: Q4_0, Q4_1, Q4_K (its
// scales rounded to f16) to kQ4, Q8_0 to kInt8. False for everything else.
bool take_block_row(GgmlType type, WeightBlocks blocks, const std::byte* source, int64_t cols,
                    BlockRow& row);

}  // namespace clo
