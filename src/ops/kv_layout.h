#pragma once
// How key and value rows, codes and head caches lie in memory: shared by every backend, so plain
// structs that a kernel can take by value. Nothing here allocates or copies.
//
// Token row: K then V of one token of one KV head, padded to 16 bytes. Rows of one head are
// contiguous inside a page, so that a fetch of one head's tokens walks few address ranges.
//
// A row has two forms. Full: both halves in KvShape::type; sinks and rings hold it. Stored: what
// the host store, slots and the rows of resident heads hold. It is the full row, or a compressed
// one (ops/stored_row.h says how the values are rounded):
//   int8  [K codes head_dim][V codes head_dim][K scale f32][V scale f32], padded to 16 bytes
//   fp8   [K codes head_dim][V codes head_dim], padded to 16 bytes
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tensor/dtype.h"

namespace clo {

enum class RowFormat : uint8_t { kFull, kInt8, kFp8 };

struct KvShape {
  int32_t num_layers = 0;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  DType type = DType::kBF16;
  int32_t code_bits = 0;  // 0: rows have no codes; otherwise a multiple of 64
  RowFormat stored = RowFormat::kFull;

  bool compressed() const { return stored != RowFormat::kFull; }
  int32_t group_size() const { return num_q_heads / num_kv_heads; }
  // Of a full row.
  int64_t value_offset() const { return head_dim * dtype_bytes(type); }
  int64_t row_bytes() const { return (2 * head_dim * dtype_bytes(type) + 15) / 16 * 16; }
  // Of a stored row. Scales are there with kInt8 alone: K's, and V's after it.
  int64_t stored_value_offset() const { return compressed() ? head_dim : value_offset(); }
  int64_t scale_offset() const { return 2 * head_dim; }
  int64_t stored_row_bytes() const {
    if (!compressed()) return row_bytes();
    return (2 * head_dim + (stored == RowFormat::kInt8 ? 8 : 0) + 15) / 16 * 16;
  }
  int32_t code_words() const { return code_bits / 64; }
  int64_t code_bytes() const { return code_bits / 8; }
  // Stored K and V of one token in all layers and heads.
  int64_t token_bytes() const { return stored_row_bytes() * num_layers * num_kv_heads; }
  int64_t token_code_bytes() const { return code_bytes() * num_layers * num_kv_heads; }
};

// What --kv-type calls the rows.
constexpr std::string_view kv_type_name(const KvShape& shape) {
  if (shape.stored == RowFormat::kInt8) return "int8";
  return shape.stored == RowFormat::kFp8 ? "fp8" : dtype_name(shape.type);
}

// Tokens in a page. One head's rows of a page are 64 KiB for head_dim 64 in bf16: long enough
// for the link and for the caches, short enough that the last, partly filled page wastes little.
inline constexpr int32_t kPageTokens = 256;

// Offsets inside the host store: [layer][page][kv_head][token] stored rows, and for codes
// [layer][page][kv_head][token][word]. All 64-bit: a store passes 2^31 elements early.
struct HostLayout {
  KvShape shape;
  int64_t num_pages = 0;

  int64_t head_rows_bytes() const { return kPageTokens * shape.stored_row_bytes(); }
  int64_t head_codes_bytes() const { return kPageTokens * shape.code_bytes(); }
  int64_t row_offset(int32_t layer, int64_t page, int32_t kv_head, int32_t token) const;
  int64_t code_offset(int32_t layer, int64_t page, int32_t kv_head, int32_t token) const;
  int64_t rows_bytes() const;
  int64_t codes_bytes() const;
  // Rows and codes of one page in all layers.
  int64_t page_bytes() const;
};

// What a head knows about its set, in the device's memory beside the rows.
struct HeadState {
  int64_t label_length = 0;    // context length at which the label's set was chosen
  int64_t candidates_end = 0;  // one past the last token that was a candidate then
  int32_t num_slots_used = 0;  // slots [0, num_slots_used) may hold rows; -1 in the map is a hole
  int32_t num_set_tokens = 0;  // rows in the set: slots used less holes
  int32_t has_label = 0;
};

// One head cache: (sequence, layer, KV head). Evictable heads own sink, ring and slots; resident
// heads own all their rows in `resident` and use slot_token as the sorted list of set tokens. Where
// stored rows are compressed they own a sink and a ring as well.
struct HeadCacheView {
  std::byte* sink = nullptr;      // [sink_tokens] full rows
  std::byte* ring = nullptr;      // [ring_tokens] full rows, token t at t mod ring_tokens
  std::byte* slots = nullptr;     // [slot_capacity] stored rows
  std::byte* resident = nullptr;  // [capacity_tokens] stored rows, token t at t; null: evictable
  int32_t* slot_token = nullptr;  // [slot_capacity] token in each slot, -1: hole
  uint64_t* held = nullptr;       // [capacity_tokens] bits: tokens that the slots hold
  float* label = nullptr;         // [group_size][head_dim] queries that chose the set
  HeadState* state = nullptr;
  int32_t sink_tokens = 0;
  int32_t ring_tokens = 0;
  int32_t slot_capacity = 0;
  int64_t capacity_tokens = 0;

  bool is_resident() const { return resident != nullptr; }
};

}  // namespace clo
