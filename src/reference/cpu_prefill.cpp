// Prefill attention: a chunk of queries against all rows so far, page by page. Each page of each
// KV head is widened and packed once for the whole chunk; query tiles then walk it with an online
// softmax. Rows of evictable heads are streamed from the host store, resident ones from the device:
// all in their stored form, the chunk's own too, so that a prompt's result depends neither on how
// it was cut nor on what of it a stored prefix supplied.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/units.h"
#include "ops/token_mask.h"
#include "reference/cpu_ops.h"

namespace clo {

namespace {

// Keys of one strip become [head_dim][kStripKeys]; missing ones are zero and masked later.
void pack_page(const SimdTable& simd, const KvShape& shape, const std::byte* rows, int count,
               float* packed_keys, float* packed_values) {
  const int dim = shape.head_dim;
  float key[kMaxHeadDim];
  for (int c = 0; c < kPageTokens; ++c) {
    float* strip =
        packed_keys + static_cast<int64_t>(c / kStripKeys * kStripKeys) * dim + c % kStripKeys;
    float* value = packed_values + static_cast<int64_t>(c) * dim;
    if (c >= count) {
      for (int d = 0; d < dim; ++d) strip[d * kStripKeys] = 0;
      std::memset(value, 0, sizeof(float) * static_cast<size_t>(dim));
      continue;
    }
    simd.widen_row(stored_kind(shape), rows + c * shape.stored_row_bytes(), dim, key, value);
    for (int d = 0; d < dim; ++d) strip[d * kStripKeys] = key[d];
  }
}

// Of the first `limit` keys of a page, how many the query of token `own` sees.
int visible_keys(const TokenMask& mask, int64_t page_begin, int limit, int64_t own) {
  const int64_t end = page_begin + limit;
  const bool sees_itself = own >= page_begin && own < end && mask.hides(own);
  return static_cast<int>(mask.num_visible(page_begin, end)) + sees_itself;
}

// Masked keys weigh nothing. scores: [limit] of the query of token `own`.
void hide_keys(const TokenMask& mask, int64_t page_begin, int limit, int64_t own, float* scores) {
  mask.for_each_masked(page_begin, page_begin + limit, [&](int64_t t, int64_t end) {
    for (; t < end; ++t) {
      if (t != own) scores[t - page_begin] = -INFINITY;
    }
  });
}

}  // namespace

void CpuOps::prefill_attention(const PrefillAttentionParams& p) {
  const KvShape& shape = p.shape;
  const int dim = shape.head_dim;
  const int64_t num_heads = shape.num_q_heads;
  const int64_t out_stride = num_heads * dim;
  const int64_t tiles = divide_up(p.num_tokens, kTileQueries);
  const int64_t end = p.first_token + p.num_tokens;
  const int64_t num_pages = divide_up(end, kPageTokens);
  const int64_t page_floats = int64_t{kPageTokens} * dim;
  const TokenMask* mask = p.sequence.mask;

  const auto grow = [](std::vector<float>& v, int64_t size) {
    if (static_cast<int64_t>(v.size()) < size) v.resize(static_cast<size_t>(size));
  };
  grow(packed_keys_, page_floats * shape.num_kv_heads);
  grow(packed_values_, page_floats * shape.num_kv_heads);
  grow(row_max_, p.num_tokens * num_heads);
  grow(row_sum_, p.num_tokens * num_heads);
  for (auto& tile : tile_) grow(tile, int64_t{kTileQueries} * kPageTokens);
  std::fill_n(row_max_.begin(), p.num_tokens * num_heads, -INFINITY);
  std::fill_n(row_sum_.begin(), p.num_tokens * num_heads, 0.0f);
  std::memset(p.out, 0, sizeof(float) * static_cast<size_t>(p.num_tokens * out_stride));

  for (int64_t page = 0; page < num_pages; ++page) {
    const int64_t page_begin = page * kPageTokens;
    const int count = static_cast<int>(std::min<int64_t>(kPageTokens, end - page_begin));
    pool_.run(shape.num_kv_heads, [&](int64_t head, int) {
      const HeadCacheView& cache = p.sequence.heads[head];
      const std::byte* rows =
          cache.is_resident()
              ? cache.resident + page_begin * shape.stored_row_bytes()
              : p.sequence.host_rows[page] + head * kPageTokens * shape.stored_row_bytes();
      pack_page(simd_, shape, rows, count, packed_keys_.data() + page_floats * head,
                packed_values_.data() + page_floats * head);
    });
    pool_.run(num_heads * tiles, [&](int64_t chunk, int thread) {
      const int64_t head = chunk / tiles, first = chunk % tiles * kTileQueries;
      const int rows = static_cast<int>(std::min<int64_t>(kTileQueries, p.num_tokens - first));
      if (p.first_token + first + rows <= page_begin) return;  // all masked
      const int64_t kv_head = head / shape.group_size();
      int limit[kTileQueries];
      float rescale[kTileQueries];
      int longest = 0;
      for (int r = 0; r < rows; ++r) {
        limit[r] = static_cast<int>(
            std::clamp<int64_t>(p.first_token + first + r + 1 - page_begin, 0, count));
        if (mask != nullptr &&
            !visible_keys(*mask, page_begin, limit[r], p.first_token + first + r)) {
          limit[r] = 0;
        }
        longest = std::max(longest, limit[r]);
      }
      if (longest == 0) return;  // a page of masked tokens
      const int keys = static_cast<int>(round_up(longest, kStripKeys));
      float* scores = tile_[static_cast<size_t>(thread)].data();
      float* max = row_max_.data() + head * p.num_tokens + first;
      float* sum = row_sum_.data() + head * p.num_tokens + first;
      simd_.score_tile(p.queries + first * p.query_stride + head * dim, p.query_stride, rows,
                       packed_keys_.data() + page_floats * kv_head, dim, keys, p.scale, scores);
      for (int r = 0; mask != nullptr && r < rows; ++r) {
        hide_keys(*mask, page_begin, limit[r], p.first_token + first + r,
                  scores + static_cast<int64_t>(r) * keys);
      }
      simd_.softmax_tile(scores, rows, keys, limit, max, sum, rescale);
      simd_.value_tile(scores, rows, keys, rescale, packed_values_.data() + page_floats * kv_head,
                       dim, p.out + first * out_stride + head * dim, out_stride);
    });
  }
  pool_.run_ranges(p.num_tokens, 16, [&](int64_t begin, int64_t last) {
    for (int64_t t = begin; t < last; ++t) {
      for (int64_t head = 0; head < num_heads; ++head) {
        const float scale = 1.0f / row_sum_[static_cast<size_t>(head * p.num_tokens + t)];
        float* out = p.out + t * out_stride + head * dim;
        for (int d = 0; d < dim; ++d) out[d] *= scale;
      }
    }
  });
}

}  // namespace clo
