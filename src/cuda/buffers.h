#pragma once
// Every buffer a runner takes from the device arena, in one list: counted for the memory plan and
// taken at creation by the same code, so that plan and use cannot differ.
#include <cstdint>
#include <functional>

#include "cuda/backend.h"
#include "kernels/decode_tables.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/tiles.h"

namespace clo {

// What of the device the plans depend on.
struct DeviceNumbers {
  int32_t num_multiprocessors = 132;
  int64_t shared_bytes = 227 * 1024;
};
// Of the present device, or of an H200 where there is none (plans are printed there too).
DeviceNumbers device_numbers();
// Clusters that refresh beside the layers, of those that are asked for: at most a block a
// multiprocessor, or the attention that waits for them could find no room beside them.
int32_t refresh_clusters(const CudaLimits& limits, bool many_jobs, int32_t num_multiprocessors);
// How a product of few rows is cut; `blocks` not kNone: its weights lie in tiles.
kernels::SkinnyPlan plan_product(WeightBlocks blocks, int64_t num_outputs, int64_t num_inputs,
                                 const DeviceNumbers& device,
                                 int32_t max_splits = kernels::kSkinnyMaxSplits);

inline constexpr int64_t kMlpRows = 8192;  // rows of a prefill chunk that pass the MLP at once
inline constexpr int64_t kMatmulWorkspace = int64_t{32} << 20;
inline constexpr int64_t kSdpaWorkspace = int64_t{64} << 20;
inline constexpr int32_t kLayerBuffers = 2;  // one computes while the other leaves

struct StepBuffers {
  // Decode, [max_batch] rows.
  float* x = nullptr;      // [rows, hidden]
  void* normed = nullptr;  // 16-bit [rows, hidden]
  void* predicted_normed = nullptr;
  float* parts = nullptr;  // of the product at hand
  float* predicted_parts = nullptr;
  float* queries = nullptr;  // [rows, q width]
  float* predicted = nullptr;
  void* attended = nullptr;  // 16-bit [rows, q width]
  void* inner = nullptr;     // 16-bit [rows, intermediate]
  float* cosine = nullptr;   // [rows, half_dim]
  float* sine = nullptr;
  float* logits = nullptr;  // [rows, vocab]
  float* attend_parts = nullptr;
  float* log_sum_exp = nullptr;  // [layers, rows, q heads] of a step whose mass is sampled
  uint32_t* arrivals = nullptr;  // [rows * kv heads]
  std::byte* sample_scratch = nullptr;
  std::byte* refresh_scratch = nullptr;  // [queue_clusters or, if more, kv heads: priming]
  int64_t scratch_bytes = 0;             // per cluster
  // Constants.
  float* inverse_frequencies = nullptr;  // [half_dim]
  uint32_t* signs = nullptr;
  float* hash_weights = nullptr;
  HashParams* hashes = nullptr;  // [layers, kv heads]
  void* qkv_bias = nullptr;      // 16-bit [layers, rows of qkv] for the library's products; or null
  void* gate_up_bias = nullptr;
  // Tables.
  kernels::BatchSlot* slots = nullptr;
  int32_t* row_slot = nullptr;
  HeadCacheView* heads = nullptr;
  kernels::HeadRule* rules = nullptr;
  uint32_t* pending = nullptr;
  kernels::DeviceCounters* counters = nullptr;
  uint32_t* decided = nullptr;
  kernels::HeadEntropy* entropies = nullptr;
  float* kept_queries = nullptr;
  int32_t* pages = nullptr;          // [max_batch, max pages]
  uint64_t** code_blocks = nullptr;  // likewise
  int32_t* answers = nullptr;        // [max_batch, max context] tokens sampled, for the penalty
  uint32_t* watched = nullptr;       // [max_batch, watched_words] bits of tokens
  int32_t** answer_of = nullptr;     // [max_batch] into it
  kernels::RefreshQueue* queue = nullptr;
  kernels::RefreshJob* jobs = nullptr;
  uint32_t queue_capacity = 0;
  int64_t max_pages = 0;
  int64_t watched_words = 0;
  // Prefill, [chunk] rows.
  int32_t* ids = nullptr;
  float* chunk_x = nullptr;       // [rows, hidden]
  void* chunk_normed = nullptr;   // 16-bit [rows, max(hidden, q width)]: also what attention writes
  void* chunk_qkv = nullptr;      // 16-bit [rows, q + 2 kv width]
  void* chunk_queries = nullptr;  // 16-bit [rows, q width]
  void* chunk_gate_up = nullptr;  // 16-bit [kMlpRows, 2 * intermediate]
  void* chunk_inner = nullptr;    // 16-bit [kMlpRows, intermediate]
  // Matrices in tiles, expanded for a layer of a chunk: down, and each of the others in turn.
  void* expanded = nullptr;
  void* expanded_down = nullptr;
  float* chunk_cosine = nullptr;  // [rows, half_dim]
  float* chunk_sine = nullptr;
  float* chunk_query = nullptr;               // [num_layers][q width] of the last row
  std::byte* layer_rows[kLayerBuffers] = {};  // [kv heads][max_context] rows of one layer
  std::byte* matmul_workspace = nullptr;
  std::byte* sdpa_workspace = nullptr;
};

struct BufferSizes {
  ModelConfig config;
  KvShape shape;
  CudaLimits limits;
  DeviceNumbers device;
  bool trained_hashes = false;
};

int64_t layer_tokens(const CudaLimits& limits);

// Calls take(pointer field, bytes) for every buffer, in order; sets the plain numbers too.
using TakeBuffer = std::function<Status(void** target, int64_t num_bytes)>;
Status take_buffers(const BufferSizes& sizes, StepBuffers& buffers, const TakeBuffer& take);

}  // namespace clo
