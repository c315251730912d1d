#pragma once
// What measurements need and serving does not: memory filled with random values of a known spread,
// so that products and caches meet data like a model's (zeros run faster), and a plain read of
// device memory as the ceiling of the same run.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "ops/kv_layout.h"
#include "tensor/weight_tiles.h"

namespace clo::kernels {

// [count] in bf16 or f16, uniform with standard deviation `deviation`; a pure function of seed and
// index.
void fill_random(DType type, void* target, int64_t count, float deviation, uint64_t seed,
                 cudaStream_t stream);
// A matrix in tiles [num_bytes]: random codes, every scale and minimum the same.
void fill_random_tiles(WeightBlocks blocks, std::byte* target, int64_t num_bytes, float deviation,
                       uint64_t seed, cudaStream_t stream);
void fill_random_f32(float* target, int64_t count, float deviation, uint64_t seed,
                     cudaStream_t stream);
void fill_constant_f32(float* target, int64_t count, float value, cudaStream_t stream);
void fill_random_words(uint64_t* target, int64_t count, uint64_t seed, cudaStream_t stream);

// Reads num_bytes (a multiple of 16) once with every multiprocessor and keeps the reads alive by
// one word written to `sink` [1].
void read_once(const std::byte* source, int64_t num_bytes, uint32_t* sink, cudaStream_t stream);

// Reads a share of one sequence's rows from the host store: tokens of each head in order, evenly
// spread with some jitter, a warp a row, every head. The ceiling of a fetch of that density.
// Returns the bytes that are read.
struct GatherOnce {
  HostLayout layout;
  const std::byte* host_rows = nullptr;  // as the device sees it
  const int32_t* pages = nullptr;        // [pages of context_tokens], on the device
  int64_t context_tokens = 0;
  double share = 0;          // of the tokens
  uint32_t* sink = nullptr;  // [1]
};
int64_t gather_once(const GatherOnce& params, cudaStream_t stream);

}  // namespace clo::kernels
