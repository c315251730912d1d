// Small kernels between products. At one row per step they are all latency: every thread asks for
// all it needs at once, and what is constant is asked for before the wait for the predecessor.
#include <algorithm>

#include "base/check.h"
#include "base/units.h"
#include "kernels/element.cuh"
#include "kernels/launch.cuh"
#include "kernels/norm/norm.h"

namespace clo::kernels {

namespace {

constexpr int kWarp = 32;
// Leaves registers for blocks of the products beside it, which start early.
constexpr int kNormThreads = 512;

__device__ __forceinline__ float4 load4(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
template <typename Element>
__device__ __forceinline__ uint2 pack(float4 v) {
  return {Element::pack(v.x, v.y), Element::pack(v.z, v.w)};
}
__device__ __forceinline__ float silu(float g) { return g / (1.0f + expf(-g)); }
__device__ __forceinline__ float4 gate(float4 g, float4 up) {
  return {silu(g.x) * up.x, silu(g.y) * up.y, silu(g.z) * up.z, silu(g.w) * up.w};
}

// Sum over the block, the same for every thread; the order is fixed. Once per kernel.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float warps[kNormThreads / kWarp];
  const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  }
  if (threadIdx.x % kWarp == 0) warps[warp] = value;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < num_warps; ++w) sum += warps[w];
  return sum;
}

// One block per row; a thread keeps kVectors x 4 elements of it.
template <typename Element, int kVectors>
__global__ void __launch_bounds__(kNormThreads) add_norm_kernel(const __grid_constant__ AddNorm p) {
  launch_dependents();
  constexpr bool kWeightEarly = kVectors <= 4;  // registers
  float4 weight[kVectors], sum[kVectors], x[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = 4 * (threadIdx.x + static_cast<int64_t>(v) * blockDim.x);
    const bool inside = i < p.width;
    if constexpr (kWeightEarly) weight[v] = inside ? load4(p.weight + i) : float4{};
    sum[v] = inside && p.bias != nullptr ? load4(p.bias + i) : float4{};
  }
  wait_for_predecessor();

  float* const row = p.x + static_cast<int64_t>(blockIdx.x) * p.width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = 4 * (threadIdx.x + static_cast<int64_t>(v) * blockDim.x);
    x[v] = i < p.width ? load4(row + i) : float4{};
  }
  if (p.parts != nullptr) {
    const float* part = p.parts + static_cast<int64_t>(blockIdx.x) * p.width;
#pragma unroll(kVectors <= 2 ? 4 : 1)  // loads in flight
    for (int32_t s = 0; s < p.splits; ++s, part += p.rows * p.width) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t i = 4 * (threadIdx.x + static_cast<int64_t>(v) * blockDim.x);
        if (i < p.width) sum[v] = sum[v] + load4(part + i);
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = 4 * (threadIdx.x + static_cast<int64_t>(v) * blockDim.x);
      x[v] = x[v] + sum[v];
      if (i < p.width) *reinterpret_cast<float4*>(row + i) = x[v];
    }
  }
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    squares += x[v].x * x[v].x + x[v].y * x[v].y + x[v].z * x[v].z + x[v].w * x[v].w;
  }
  squares = block_sum(squares);
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(p.width) + p.epsilon);
  auto* const out = static_cast<uint16_t*>(p.out) + static_cast<int64_t>(blockIdx.x) * p.width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = 4 * (threadIdx.x + static_cast<int64_t>(v) * blockDim.x);
    if constexpr (!kWeightEarly) weight[v] = i < p.width ? load4(p.weight + i) : float4{};
    const float4 y = {x[v].x * scale * weight[v].x, x[v].y * scale * weight[v].y,
                      x[v].z * scale * weight[v].z, x[v].w * scale * weight[v].w};
    if (i < p.width) *reinterpret_cast<uint2*>(out + i) = pack<Element>(y);
  }
}

constexpr int kGateThreads =
    128;  // small blocks, so that one row spreads over many multiprocessors

// Four elements per thread.
template <typename Element>
__global__ void __launch_bounds__(kGateThreads)
    gated_silu_kernel(const __grid_constant__ GatedSilu p) {
  launch_dependents();
  const int64_t per_row = p.width / 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kGateThreads + threadIdx.x;
  const bool inside = index < p.rows * per_row;
  const int64_t row = index / per_row, i = index % per_row * 4;
  float4 g = {}, up = {};
  if (inside && p.bias != nullptr) {
    g = load4(p.bias + i);
    up = load4(p.bias + p.width + i);
  }
  wait_for_predecessor();
  if (!inside) return;

  const float* part = p.parts + row * 2 * p.width + i;
#pragma unroll 4
  for (int32_t s = 0; s < p.splits; ++s, part += p.rows * 2 * p.width) {
    g = g + load4(part);
    up = up + load4(part + p.width);
  }
  auto* const out = static_cast<uint16_t*>(p.out) + row * p.width + i;
  *reinterpret_cast<uint2*>(out) = pack<Element>(gate(g, up));
}

constexpr int kRowsThreads = 256;

// Eight elements per thread.
template <typename Element>
__global__ void __launch_bounds__(kRowsThreads)
    gated_silu_rows_kernel(const __grid_constant__ GatedSiluRows p) {
  launch_dependents();
  wait_for_predecessor();
  const int64_t per_row = p.width / 8;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsThreads + threadIdx.x;
  if (index >= p.rows * per_row) return;

  const int64_t row = index / per_row, i = index % per_row * 8;
  const auto* const x = static_cast<const uint16_t*>(p.x) + row * 2 * p.width + i;
  const uint4 g = *reinterpret_cast<const uint4*>(x);
  const uint4 up = *reinterpret_cast<const uint4*>(x + p.width);
  const auto gate_pair = [](uint32_t g_pair, uint32_t up_pair) {
    const float2 a = Element::unpack(g_pair), b = Element::unpack(up_pair);
    return Element::pack(silu(a.x) * b.x, silu(a.y) * b.y);
  };
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + row * p.width + i) =
      uint4{gate_pair(g.x, up.x), gate_pair(g.y, up.y), gate_pair(g.z, up.z), gate_pair(g.w, up.w)};
}

constexpr int kBeginThreads = 256;

// What begin_step and begin_chunk share: where a row's token and position lead.
struct Begin {
  const void* table;  // [vocab_size, width], or its tiles
  WeightBlocks blocks;
  const float* inverse_frequencies;
  float* x;
  float* cosine;
  float* sine;
  float attention_factor;
  int64_t width;
  int32_t half_dim;
};

__device__ __forceinline__ float half_at(const std::byte* at) {
  return __half2float(*reinterpret_cast<const __half*>(at));
}

// One number of a matrix in tiles.
__device__ __forceinline__ float tiled_value(const Begin& b, int64_t row, int64_t column) {
  const int width = tile_inputs(b.blocks);
  const auto* tile = static_cast<const std::byte*>(b.table) +
                     (row / kTileOutputs * tiles_across(b.blocks, b.width) + column / width) *
                         tile_bytes(b.blocks);
  const TilePlace place =
      tile_place(b.blocks, static_cast<int>(row % kTileOutputs), static_cast<int>(column % width));
  const auto code = static_cast<uint8_t>(tile[place.byte]);
  const float scale = half_at(tile + place.scale);
  if (b.blocks == WeightBlocks::kInt8) {
    return __fmul_rn(scale, static_cast<float>(static_cast<int8_t>(code)));
  }
  return __fadd_rn(__fmul_rn(scale, static_cast<float>(code >> place.shift & 15)),
                   half_at(tile + place.minimum));
}

// token < 0: no sequence, zeros.
template <typename Element>
__device__ __forceinline__ void begin_row(const Begin& b, int64_t row, int64_t token,
                                          int64_t position) {
  if (b.blocks != WeightBlocks::kNone) {
    for (int64_t i = threadIdx.x; i < b.width; i += kBeginThreads) {
      b.x[row * b.width + i] = token < 0 ? 0.0f : tiled_value(b, token, i);
    }
  } else {
    const auto* table = static_cast<const uint16_t*>(b.table);
    for (int64_t i = threadIdx.x * 8; i < b.width; i += kBeginThreads * 8) {
      const uint4 e =
          token < 0 ? uint4{} : *reinterpret_cast<const uint4*>(table + token * b.width + i);
      const float2 v[4] = {Element::unpack(e.x), Element::unpack(e.y), Element::unpack(e.z),
                           Element::unpack(e.w)};
      auto* const out = reinterpret_cast<float4*>(b.x + row * b.width + i);
      out[0] = {v[0].x, v[0].y, v[1].x, v[1].y};
      out[1] = {v[2].x, v[2].y, v[3].x, v[3].y};
    }
  }
  for (int32_t i = threadIdx.x; i < b.half_dim; i += kBeginThreads) {
    float cosine = 0, sine = 0;
    if (token >= 0) {
      // As CpuOps::rotary_table: the product rounded to f32, its cosine then taken exactly.
      const float angle = static_cast<float>(position) * b.inverse_frequencies[i];
      double exact_sine, exact_cosine;
      sincos(static_cast<double>(angle), &exact_sine, &exact_cosine);
      cosine = static_cast<float>(exact_cosine) * b.attention_factor;
      sine = static_cast<float>(exact_sine) * b.attention_factor;
    }
    b.cosine[row * b.half_dim + i] = cosine;
    b.sine[row * b.half_dim + i] = sine;
  }
}

template <typename Element>
__global__ void __launch_bounds__(kBeginThreads)
    begin_step_kernel(const __grid_constant__ DecodeTables tables,
                      const __grid_constant__ Begin begin) {
  launch_dependents();
  wait_for_predecessor();
  if (blockIdx.x == 0 && threadIdx.x == 0 && tables.queue != nullptr) {
    store_release(&tables.queue->step, tables.queue->step + 1);
  }
  const int32_t slot = tables.row_slot[blockIdx.x];
  int64_t token = -1, position = 0;
  if (slot >= 0 && tables.slots[slot].active != 0) {
    token = tables.slots[slot].token;
    position = tables.slots[slot].num_tokens;
  }
  begin_row<Element>(begin, blockIdx.x, token, position);
}

template <typename Element>
__global__ void __launch_bounds__(kBeginThreads)
    begin_chunk_kernel(const int32_t* ids, int64_t first_position,
                       const __grid_constant__ Begin begin) {
  launch_dependents();
  wait_for_predecessor();
  begin_row<Element>(begin, blockIdx.x, ids[blockIdx.x], first_position + blockIdx.x);
}

// All shared memory to blocks, though these kernels use little: a multiprocessor changes its split
// of L1 and shared memory only when idle, and the products beside these kernels need it large.
template <typename Kernel>
void prefer_shared_memory(Kernel* kernel) {
  CLO_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared));
}

template <int kVectors>
void launch_add_norm(const AddNorm& params, int threads, cudaStream_t stream) {
  with_element(params.type, [&]<typename Element>(Element) {
    static const bool ready = (prefer_shared_memory(add_norm_kernel<Element, kVectors>), true);
    (void)ready;
    launch(add_norm_kernel<Element, kVectors>, dim3(static_cast<unsigned>(params.rows)),
           dim3(static_cast<unsigned>(threads)), 0, stream, params);
  });
}

Begin make_begin(const auto& params) {
  CLO_CHECK(params.width >= 8 && params.width % 8 == 0, params.width);
  CLO_CHECK(params.blocks == WeightBlocks::kNone || params.width % kBlockInputs == 0, params.width);
  return {.table = params.table,
          .blocks = params.blocks,
          .inverse_frequencies = params.inverse_frequencies,
          .x = params.x,
          .cosine = params.cosine,
          .sine = params.sine,
          .attention_factor = params.attention_factor,
          .width = params.width,
          .half_dim = params.half_dim};
}

}  // namespace

void add_norm(const AddNorm& params, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1 && params.width >= 8 && params.width % 8 == 0, params.rows,
            params.width);
  // A function of the width alone, so that a row's sum is the same in every batch.
  const int64_t vectors = params.width / 4;
  const int threads = static_cast<int>(std::min<int64_t>(round_up(vectors, kWarp), kNormThreads));
  const int64_t per_thread = divide_up(vectors, threads);
  CLO_CHECK(per_thread <= 8, params.width);
  if (per_thread <= 1) return launch_add_norm<1>(params, threads, stream);
  if (per_thread <= 2) return launch_add_norm<2>(params, threads, stream);
  if (per_thread <= 4) return launch_add_norm<4>(params, threads, stream);
  launch_add_norm<8>(params, threads, stream);
}

void gated_silu(const GatedSilu& params, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1 && params.width >= 8 && params.width % 8 == 0 && params.splits >= 1,
            params.rows, params.width, params.splits);
  with_element(params.type, [&]<typename Element>(Element) {
    static const bool ready = (prefer_shared_memory(gated_silu_kernel<Element>), true);
    (void)ready;
    const int64_t blocks = divide_up(params.rows * (params.width / 4), kGateThreads);
    launch(gated_silu_kernel<Element>, dim3(static_cast<unsigned>(blocks)), dim3(kGateThreads), 0,
           stream, params);
  });
}

void gated_silu_rows(const GatedSiluRows& params, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1 && params.width >= 8 && params.width % 8 == 0, params.rows,
            params.width);
  with_element(params.type, [&]<typename Element>(Element) {
    static const bool ready = (prefer_shared_memory(gated_silu_rows_kernel<Element>), true);
    (void)ready;
    const int64_t blocks = divide_up(params.rows * (params.width / 8), kRowsThreads);
    launch(gated_silu_rows_kernel<Element>, dim3(static_cast<unsigned>(blocks)), dim3(kRowsThreads),
           0, stream, params);
  });
}

void begin_step(const BeginStep& params, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1, params.rows);
  with_element(params.type, [&]<typename Element>(Element) {
    static const bool ready = (prefer_shared_memory(begin_step_kernel<Element>), true);
    (void)ready;
    launch(begin_step_kernel<Element>, dim3(static_cast<unsigned>(params.rows)),
           dim3(kBeginThreads), 0, stream, params.tables, make_begin(params));
  });
}

void begin_chunk(const BeginChunk& params, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1, params.rows);
  with_element(params.type, [&]<typename Element>(Element) {
    static const bool ready = (prefer_shared_memory(begin_chunk_kernel<Element>), true);
    (void)ready;
    launch(begin_chunk_kernel<Element>, dim3(static_cast<unsigned>(params.rows)),
           dim3(kBeginThreads), 0, stream, params.ids, params.first_position, make_begin(params));
  });
}

}  // namespace clo::kernels
