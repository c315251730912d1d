#pragma once
// Parameters of every operation: plain structs, shapes on the fields. Arrays named by a pointer
// live in the backend's own memory; activations are f32. Row-major throughout.
#include <cstddef>
#include <cstdint>

#include "ops/code_limits.h"
#include "ops/kv_layout.h"
#include "tensor/weight_blocks.h"

namespace clo {

class TokenMask;

struct WeightView {
  const std::byte* data = nullptr;  // [num_rows, num_cols], 64-byte aligned
  DType type = DType::kBF16;
  int64_t num_rows = 0;  // output features
  int64_t num_cols = 0;  // input features
  // Not kNone: the data lies in blocks, whatever `type` says; `tiled`: in the tiles of a GPU.
  WeightBlocks blocks = WeightBlocks::kNone;
  bool tiled = false;
};

struct EmbedParams {
  WeightView table;              // [vocab_size, hidden_size]
  const int32_t* ids = nullptr;  // [num_tokens]
  float* out = nullptr;          // [num_tokens, hidden_size]
  int64_t num_tokens = 0;
};

// out = x / sqrt(mean(x^2) + epsilon) * weight, over each row.
struct RmsNormParams {
  const float* x = nullptr;       // [num_rows, width]
  const float* weight = nullptr;  // [width]
  float* out = nullptr;           // [num_rows, width]; may be x
  int64_t num_rows = 0;
  int64_t width = 0;
  int64_t stride = 0;  // elements from a row of x (and of out) to the next
  float epsilon = 0;
};

// out = x weight^T (+ bias); accumulate: out += x weight^T.
struct LinearParams {
  WeightView weight;
  const float* bias = nullptr;  // [weight.num_rows] or null
  const float* x = nullptr;     // [num_rows, weight.num_cols]
  float* out = nullptr;         // [num_rows, out_stride]
  int64_t num_rows = 0;
  int64_t out_stride = 0;
  bool accumulate = false;
};

// cos and sin of every position's angles, times the attention factor (YaRN): made once per step,
// read by every layer.
struct RotaryTableParams {
  const int64_t* positions = nullptr;          // [num_rows]
  const float* inverse_frequencies = nullptr;  // [half_dim]
  float* cosine = nullptr;                     // [num_rows, half_dim]
  float* sine = nullptr;                       // [num_rows, half_dim]
  float attention_factor = 1;
  int64_t num_rows = 0;
  int32_t half_dim = 0;
};

// QK-norm (optional) and rotary embedding, in place, of heads in a projection's output. The
// rotation pairs element i with i + head_dim/2 (the layout of Hugging Face checkpoints).
struct RotateParams {
  float* x = nullptr;  // [num_rows, stride]; heads are the first num_heads x head_dim elements
  const float* cosine = nullptr;       // [num_rows, head_dim / 2]
  const float* sine = nullptr;         // [num_rows, head_dim / 2]
  const float* norm_weight = nullptr;  // [head_dim] or null: no QK-norm
  float norm_epsilon = 0;
  int64_t num_rows = 0;
  int64_t stride = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;
};

// out = silu(gate) * up, with gate and up side by side in x.
struct GatedSiluParams {
  const float* x = nullptr;  // [num_rows, 2 * width]
  float* out = nullptr;      // [num_rows, width]
  int64_t num_rows = 0;
  int64_t width = 0;
};

// How a key or query is projected, and a key becomes bits: bit j is set when projection j is
// positive.
// Without weights: two rounds of sign flips and a fast Walsh-Hadamard transform in f32 with a
// fixed butterfly, so that every backend computes the same bits; bits beyond head_dim come from
// further independent bases.
struct HashParams {
  const uint32_t* signs = nullptr;  // [num_bases][2][width/32] sign bits of this layer and head
  // [head_dim + 1, bits] trained projection, or null. The last row is added to projections of keys
  // that become codes: where between them each bit's boundary lies.
  const float* weights = nullptr;
  int32_t head_dim = 0;
  int32_t width = 0;  // head_dim rounded up to a power of two, at least 32
  int32_t bits = 0;
};

// Values of a head's trained projection.
inline int64_t hash_weight_count(int64_t head_dim, int64_t bits) { return (head_dim + 1) * bits; }

// Where the rows of one sequence go and come from, in one layer. Page pointers are per page of
// the sequence: page p holds tokens [p * kPageTokens, (p + 1) * kPageTokens).
struct SequenceLayerView {
  std::byte* const* host_rows = nullptr;    // [num_pages] -> [kv_head][token] rows; null: no copy
  uint64_t* const* host_codes = nullptr;    // [num_pages] -> [kv_head][token] codes; null: none
  uint64_t* const* device_codes = nullptr;  // [num_pages] -> [kv_head][token] codes; null: none
  HeadCacheView* heads = nullptr;           // [num_kv_heads]
  const TokenMask* mask = nullptr;          // null: none. By the CPU backend alone
};

// Writes K and V of new tokens to the ring (and sink), to resident rows, to the host page with
// its code, and the code to the device: one pass, so no row is ever in one place only.
struct AppendParams {
  KvShape shape;
  const SequenceLayerView* sequences = nullptr;  // [num_sequences]
  const int64_t* first_token = nullptr;          // [num_sequences] position of the first new row
  const HashParams* hashes = nullptr;            // [num_kv_heads] of this layer, or null
  const float* keys = nullptr;                   // rows of all sequences, one after another
  const float* values = nullptr;                 // likewise
  int64_t row_stride = 0;                        // elements from a token's keys to the next token's
  int64_t num_sequences = 0;
  int64_t tokens_per_sequence = 0;
};

// Causal attention of new tokens over all tokens up to each of them; with a mask over the visible
// ones and the token itself.
struct PrefillAttentionParams {
  KvShape shape;
  SequenceLayerView sequence;
  const float* queries = nullptr;  // [num_tokens, query_stride]
  float* out = nullptr;            // [num_tokens, num_q_heads * head_dim]
  int64_t query_stride = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  float scale = 0;
};

// One head of one sequence in a decode step, for the operations below.
struct HeadTask {
  HeadCacheView* head = nullptr;
  const SequenceLayerView* sequence = nullptr;
  const float* query = nullptr;  // [group_size, head_dim], after rotation
  float* out = nullptr;          // [group_size, head_dim]
  int64_t context_tokens = 0;    // tokens in context, the newest included
  int32_t kv_head = 0;
  int32_t layer = 0;
  bool attend_all = false;  // resident head: every row, not only the set
};

// cosine[task][j] = cos(query_j, label_j); NaN where either is zero or not finite.
struct CosineParams {
  KvShape shape;
  const HeadTask* tasks = nullptr;
  float* cosine = nullptr;  // [num_tasks, group_size]
  int64_t num_tasks = 0;
};

enum class SelectKind : uint8_t { kHash, kGradedHash, kExact, kRandom };

// Chooses the num_select best of tokens [first_candidate, end_candidate), in token order; among
// equal scores the lower token wins. Masked tokens are no candidates.
struct SelectTask {
  HeadTask head;
  const HashParams* hash = nullptr;
  SelectKind kind = SelectKind::kHash;
  uint64_t random_seed = 0;
  int64_t first_candidate = 0;
  int64_t end_candidate = 0;
  int32_t num_select = 0;
  int32_t* tokens = nullptr;  // [num_select] result, ascending
};

struct SelectParams {
  KvShape shape;
  const SelectTask* tasks = nullptr;
  int64_t num_tasks = 0;
  float scale = 0;
};

// Attention over [sink | set | ring] of each task, or over all rows; masked ones are left out.
// Requires: the newest token is not masked.
struct AttendParams {
  KvShape shape;
  const HeadTask* tasks = nullptr;
  int64_t num_tasks = 0;
  float scale = 0;
  float* log_sum_exp = nullptr;  // [num_tasks, group_size] or null
  int64_t* rows_read = nullptr;  // [num_tasks] or null
  float* min_entropy =
      nullptr;  // [num_tasks, group_size] or null: -log of the largest weight, nats
};

// log of the sum of exp(score) over every visible row in context, or over those listed, read from
// the host store or resident rows: what the attended rows are compared with when attention mass is
// measured or sampled.
struct FullScoreParams {
  KvShape shape;
  const HeadTask* tasks = nullptr;
  int64_t num_tasks = 0;
  float scale = 0;
  float* log_sum_exp = nullptr;  // [num_tasks, group_size]
  // Of every task. Null: all rows. Requires: none of them a sink or in the ring.
  const int32_t* tokens = nullptr;  // [num_tokens]
  int64_t num_tokens = 0;
};

// How far the keys of a head lie apart: the root mean square of their differences from their mean,
// per dimension, over the listed rows of the host store or of a resident head.
struct KeySpreadParams {
  KvShape shape;
  const HeadTask* tasks = nullptr;
  int64_t num_tasks = 0;
  const int32_t* tokens = nullptr;  // [num_tokens]
  int64_t num_tokens = 0;
  float* spread = nullptr;  // [num_tasks]
};

}  // namespace clo
