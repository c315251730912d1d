#pragma once
// Device mirrors of select/set_rule.h and reuse/reuse_rule.h, and addresses of rows. The tests of
// refresh/ compare them with the originals.
#include <cstdint>

#include "kernels/decode_tables.h"
#include "ops/mass_draw.h"

namespace clo::kernels {

__device__ __forceinline__ int64_t table_index(const DecodeTables& t, int32_t slot, int32_t layer,
                                               int32_t kv_head) {
  return (static_cast<int64_t>(slot) * t.shape.num_layers + layer) * t.shape.num_kv_heads + kv_head;
}

__device__ __forceinline__ int group_size(const KvShape& s) {
  return s.num_q_heads / s.num_kv_heads;
}
__device__ __forceinline__ int64_t code_words(const KvShape& s) { return s.code_bits / 64; }
__device__ __forceinline__ int64_t row_bytes(const KvShape& s) {
  const int64_t element = s.type == DType::kF32 ? 4 : 2;
  return (2 * s.head_dim * element + 15) / 16 * 16;
}

__device__ __forceinline__ int64_t stored_row_bytes(const KvShape& s) {
  if (s.stored == RowFormat::kFull) return row_bytes(s);
  return (2 * s.head_dim + (s.stored == RowFormat::kInt8 ? 8 : 0) + 15) / 16 * 16;
}

// set_rule: k at this context, by the policy alone.
__device__ __forceinline__ int64_t policy_set_size(const SequenceRules& r, int64_t context_tokens) {
  if (r.set_tokens > 0) return r.set_tokens;
  const int64_t share =
      static_cast<int64_t>(ceil(r.kv_ratio * static_cast<double>(context_tokens) - 1e-9));
  const int64_t rounded = (share + 63) / 64 * 64;
  return rounded > 256 ? rounded : 256;
}
// set_rule: scaled_set_size.
__device__ __forceinline__ int64_t scaled_set_size(int64_t set_tokens, double scale) {
  const auto scaled = static_cast<int64_t>(__dmul_rn(scale, static_cast<double>(set_tokens)));
  const int64_t rounded = (scaled + 63) / 64 * 64;
  return rounded > 64 ? rounded : 64;
}
// The dial's setting for a context: of the two the later one that has begun by then.
__device__ __forceinline__ double set_scale(const SequenceRules& r, int64_t context_tokens) {
  const int64_t first = r.set_scales[0].from_context, second = r.set_scales[1].from_context;
  const bool take_second = second <= context_tokens && (second > first || first > context_tokens);
  return r.set_scales[take_second ? 1 : 0].scale;
}
// k at this context.
__device__ __forceinline__ int64_t set_size(const SequenceRules& r, int64_t context_tokens) {
  const int64_t size = policy_set_size(r, context_tokens);
  return r.has_dial ? scaled_set_size(size, set_scale(r, context_tokens)) : size;
}
// set_rule: candidates are tokens [sink, candidates_end).
__device__ __forceinline__ int64_t candidates_end(const SequenceRules& r, int64_t context_tokens) {
  const int64_t end = context_tokens - r.recent;
  return end > r.sink ? end : r.sink;
}
__device__ __forceinline__ bool covers(const SequenceRules& r, int64_t context_tokens) {
  return set_size(r, context_tokens) >= candidates_end(r, context_tokens) - r.sink;
}
// Attention::make_task: a resident head reads every row.
__device__ __forceinline__ bool attends_all(const SequenceRules& r, bool resident, int32_t layer,
                                            int64_t context_tokens) {
  return resident &&
         (r.select == SelectRule::kNone || layer < r.dense_layers || covers(r, context_tokens));
}

// Whether a head's attention mass is sampled in the step of this context (mass/mass.h).
__device__ __forceinline__ bool looks_at_mass(const DecodeTables& t, int32_t slot, int32_t layer,
                                              int32_t kv_head, int64_t context_tokens) {
  const MassLooks looks = t.slots[slot].rules.looks;
  if (looks == MassLooks::kNone) return false;
  return looks == MassLooks::kAll ||
         is_looked_at(context_tokens, layer * t.shape.num_kv_heads + kv_head,
                      t.shape.num_layers * t.shape.num_kv_heads);
}

// Stored row of a token in the host store, codes of a page's head in its code block.
__device__ __forceinline__ const std::byte* host_row(const DecodeTables& t, const BatchSlot& slot,
                                                     int32_t layer, int32_t kv_head,
                                                     int64_t token) {
  const int64_t page = slot.pages[token / kPageTokens];
  const int64_t head_rows = (layer * t.host.num_pages + page) * t.shape.num_kv_heads + kv_head;
  return t.host_rows + (head_rows * kPageTokens + token % kPageTokens) * stored_row_bytes(t.shape);
}
// A code block is [layer][kv_head][token of the page][word].
__device__ __forceinline__ uint64_t* block_codes(const KvShape& s, uint64_t* block, int32_t layer,
                                                 int32_t kv_head) {
  return block +
         (static_cast<int64_t>(layer) * s.num_kv_heads + kv_head) * kPageTokens * code_words(s);
}

}  // namespace clo::kernels
