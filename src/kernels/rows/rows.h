#pragma once
// From a projection's output to token rows: bias, QK-norm and rotation; then K and V go to ring,
// sink or resident rows, to their host page and, as a code, to the code blocks, in one kernel, so
// that no row is ever in one place only (write-through).
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/decode_tables.h"

namespace clo::kernels {

// One new token per row of a decode step, at position num_tokens of its slot; rows without a
// sequence write nothing, nor does a position past capacity_tokens (a step launched ahead). Element
// order and rounding are the CPU backend's: QK-norm, rotation of element i with i + head_dim / 2, K
// and V rounded to the row type, the code made from the rounded key.
//
// The queries also decide, for heads that do not attend everything: what this layer's attention
// must wait for goes into the refresh queue, what the next step will need is noted in decided
// (rules: refresh/decide.cuh).
struct DecodeRows {
  DecodeTables tables;
  const float* parts = nullptr;   // [splits][rows][(num_q_heads + 2 num_kv_heads) * head_dim]
  const float* bias = nullptr;    // of the projection, or null
  const float* q_norm = nullptr;  // [head_dim] or null
  const float* k_norm = nullptr;
  const float* cosine = nullptr;  // [rows, head_dim / 2]
  const float* sine = nullptr;
  float* queries = nullptr;  // out [rows, num_q_heads * head_dim], rotated
  float norm_epsilon = 0;
  int32_t layer = 0;
  int32_t rows = 0;
  int32_t splits = 1;
};
void decode_rows(const DecodeRows& params, cudaStream_t stream);

// Only the queries, of a projection that foresees the next layer's: bias, QK-norm, rotation.
struct PredictedQueries {
  KvShape shape;
  const float* parts = nullptr;  // [splits][rows][num_q_heads * head_dim]
  const float* bias = nullptr;   // [num_q_heads * head_dim] or null
  const float* q_norm = nullptr;
  const float* cosine = nullptr;
  const float* sine = nullptr;
  float* queries = nullptr;  // [rows, num_q_heads * head_dim]
  float norm_epsilon = 0;
  int32_t rows = 0;
  int32_t splits = 1;
};
void predicted_queries(const PredictedQueries& params, cudaStream_t stream);

// A prefill chunk of one sequence in one layer: K and V rows of tokens [first_token, first_token +
// rows) into the layer buffer, codes into the code blocks, queries rotated. What belongs elsewhere
// is copied from the layer buffer afterwards (store_chunk). Projection and queries are of the rows'
// type.
struct ChunkRows {
  KvShape shape;
  const void* qkv = nullptr;  // [rows][(num_q_heads + 2 num_kv_heads) * head_dim], bias added
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  const float* cosine = nullptr;  // [rows, head_dim / 2]
  const float* sine = nullptr;
  void* queries = nullptr;      // out [rows, num_q_heads * head_dim]
  float* last_query = nullptr;  // out [num_q_heads * head_dim] f32 of the chunk's last row, or null
  std::byte* layer_rows = nullptr;  // [num_kv_heads][layer_capacity] rows of this layer
  int64_t layer_capacity = 0;
  const HashParams* hashes = nullptr;      // [num_kv_heads] of this layer (device), or null
  uint64_t* const* code_blocks = nullptr;  // [pages] (device), or null
  float norm_epsilon = 0;
  int32_t layer = 0;
  int64_t first_token = 0;
  int64_t rows = 0;
};
void chunk_rows(const ChunkRows& params, cudaStream_t stream);

// Copies rows [first_token, first_token + rows) of one layer from the layer buffer to where the
// sequence keeps them: resident rows, sink and ring. Device to device.
struct StoreChunk {
  KvShape shape;
  const HeadCacheView* heads = nullptr;  // [num_kv_heads] of the layer (device)
  const std::byte* layer_rows = nullptr;
  int64_t layer_capacity = 0;
  int64_t first_token = 0;
  int64_t rows = 0;
  int64_t end_token = 0;  // ring holds rows up to this one: normally first_token + rows
};
void store_chunk(const StoreChunk& params, cudaStream_t stream);

// Rows [first_token, end_token) of one layer and all KV heads between the layer buffer and host
// pages; when both `host_codes` and `code_blocks` are set also their codes, in the same direction.
// 16 bytes a lane; a few blocks saturate the link (bench fetch). to_host: device to host, otherwise
// host to device.
struct MovePages {
  HostLayout layout;
  std::byte* host_rows = nullptr;          // as the device sees it
  uint64_t* host_codes = nullptr;          // or null
  const int32_t* pages = nullptr;          // host page ids of the sequence (device)
  uint64_t* const* code_blocks = nullptr;  // (device) codes of the pages, all layers, or null
  std::byte* layer_rows = nullptr;
  int64_t layer_capacity = 0;
  int64_t first_token = 0;
  int64_t end_token = 0;
  int32_t layer = 0;
  int32_t num_blocks = 16;
  bool to_host = true;
};
void move_pages(const MovePages& params, cudaStream_t stream);

// Compressed rows to the full rows they stand for. copies [count] in device-readable memory.
struct RowCopy;
void expand_rows(const RowCopy* copies, int64_t count, const KvShape& shape, int32_t num_blocks,
                 cudaStream_t stream);
// Tokens [0, num_tokens) of a layer whose heads are all resident and compressed, as full rows in
// the layer buffer.
struct ExpandResident {
  KvShape shape;
  const HeadCacheView* heads = nullptr;  // [num_kv_heads] of the layer (device)
  std::byte* layer_rows = nullptr;
  int64_t layer_capacity = 0;
  int64_t num_tokens = 0;
};
void expand_resident(const ExpandResident& params, cudaStream_t stream);

// Plain list of row copies, for restoring rows at admission: sources may be host pages.
struct RowCopy {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
};
// copies [count] in device-readable memory; row_bytes a multiple of 16.
// load_copy_rows: so that its first launch need not load it, which may wait for all that runs.
void load_copy_rows();
// Whether this program has kernels for the present device.
bool has_kernels_for_device();
void copy_rows(const RowCopy* copies, int64_t count, int64_t row_bytes, int32_t num_blocks,
               cudaStream_t stream);

}  // namespace clo::kernels
