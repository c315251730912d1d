#include "ops/kv_layout.h"

namespace clo {

int64_t HostLayout::row_offset(int32_t layer, int64_t page, int32_t kv_head, int32_t token) const {
  const int64_t head_rows = (layer * num_pages + page) * shape.num_kv_heads + kv_head;
  return (head_rows * kPageTokens + token) * shape.stored_row_bytes();
}

int64_t HostLayout::code_offset(int32_t layer, int64_t page, int32_t kv_head, int32_t token) const {
  const int64_t head_rows = (layer * num_pages + page) * shape.num_kv_heads + kv_head;
  return (head_rows * kPageTokens + token) * shape.code_bytes();
}

int64_t HostLayout::page_bytes() const {
  return kPageTokens * (shape.token_bytes() + shape.token_code_bytes());
}

int64_t HostLayout::rows_bytes() const { return num_pages * kPageTokens * shape.token_bytes(); }

int64_t HostLayout::codes_bytes() const {
  return num_pages * kPageTokens * shape.token_code_bytes();
}

}  // namespace clo
