// The weight-streaming product. Weights are read once and never again, so what counts is bytes in
// flight: a block keeps a ring of stages full with asynchronous copies and computes on what has
// arrived. The tensor cores are idle most of the time; they are here because they make the sums of
// 16 rows as cheap as those of one.
//
// Weights are the A operand (16 output features x 16 input features), rows of x the B operand, so
// that up to 8 rows cost one instruction. Of a block's 8 warps, 4 lie along the tile's outputs, 2
// along the stage's inputs; the two halves are added when an item ends.
//
// Order of a sum: the same for any number of rows, since a column of the B operand never meets
// another.
#include "base/check.h"
#include "kernels/launch.cuh"
#include "kernels/linear/linear.h"
#include "kernels/tensor_core.cuh"

namespace clo::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kOutputWarps = 4;                    // along a tile's outputs, 16 each
constexpr int kRowBytes = 2 * kSkinnyStageInputs;  // of a stage, one output feature or row of x
constexpr int kPieces = kRowBytes / 16;            // 16-byte pieces of it
constexpr int kRowsAtOnce = kThreads / kPieces;    // rows that one copy of every thread covers
constexpr int kWeightBytes = kSkinnyTileOutputs * kRowBytes;
constexpr int kSteps = kSkinnyStageInputs / 16 / 2;  // of 16 inputs, for one of the two warps
static_assert(kOutputWarps * 16 == kSkinnyTileOutputs && kRowsAtOnce == kSkinnyRows);

struct Work {
  const std::byte* weight;  // [num_outputs][row_bytes]
  const std::byte* x;       // [rows][row_bytes]
  float* out;
  int64_t num_outputs;
  int64_t row_bytes;
  int32_t rows;
  int32_t splits;
  int32_t split_chunks;
  int32_t chunks;  // stages along the inputs
  int32_t items;   // tiles x splits
};

// A place in a block's sequence of stages: its items in turn, each item's chunks in turn.
struct Cursor {
  int32_t item, chunk, end;

  __device__ explicit Cursor(const Work& w) : item(static_cast<int32_t>(blockIdx.x)) { open(w); }
  __device__ bool valid(const Work& w) const { return item < w.items; }
  __device__ bool at_last_chunk() const { return chunk + 1 == end; }
  __device__ void advance(const Work& w) {
    if (++chunk < end) return;
    item += static_cast<int32_t>(gridDim.x);
    open(w);
  }

 private:
  __device__ void open(const Work& w) {
    chunk = item % w.splits * w.split_chunks;
    end = min(chunk + w.split_chunks, w.chunks);
  }
};

// Rows of 256 bytes lie under each other; piece p of row r is found at p ^ (r % 8), so that the
// eight rows of a matrix that ldmatrix reads fall into different banks.
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
  return static_cast<uint32_t>(row * kRowBytes + ((piece ^ (row & 7)) << 4));
}

// What one thread copies of a stage: one piece of the rows `row`, `row` + 16, ...
struct Copier {
  int row, piece;
  uint32_t offset;

  __device__ Copier() : row(threadIdx.x / kPieces), piece(threadIdx.x % kPieces) {
    offset = piece_offset(row, piece);
  }
  __device__ int64_t column(const Cursor& at) const {
    return static_cast<int64_t>(at.chunk) * kRowBytes + piece * 16;
  }
  // Past the last output or input: zeros, and nothing is read.
  __device__ void weights(const Work& w, const Cursor& at, uint32_t stage) const {
    const int64_t column_bytes = column(at);
    const int64_t output = static_cast<int64_t>(at.item / w.splits) * kSkinnyTileOutputs + row;
    const std::byte* source = w.weight + output * w.row_bytes + column_bytes;
#pragma unroll
    for (int i = 0; i < kSkinnyTileOutputs / kRowsAtOnce; ++i) {
      const bool valid = output + i * kRowsAtOnce < w.num_outputs && column_bytes < w.row_bytes;
      copy_async_16(stage + offset + i * kRowsAtOnce * kRowBytes,
                    valid ? source + i * kRowsAtOnce * w.row_bytes : w.weight, valid);
    }
  }
  // Rows of x past the last stay as they are: their sums are thrown away.
  __device__ void x(const Work& w, const Cursor& at, uint32_t stage) const {
    if (row >= w.rows) return;
    const int64_t column_bytes = column(at);
    const bool valid = column_bytes < w.row_bytes;
    copy_async_16(stage + kWeightBytes + offset,
                  valid ? w.x + row * w.row_bytes + column_bytes : w.x, valid);
  }
  __device__ uint4 load_x(const Work& w, const Cursor& at) const {
    const int64_t column_bytes = column(at);
    if (row >= w.rows || column_bytes >= w.row_bytes) return uint4{0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(w.x + row * w.row_bytes + column_bytes);
  }
};

// sum[t] += 16 outputs x (64 inputs) x rows [8 t, 8 t + 8): this warp's share of one stage.
template <typename Element, int kRowTiles>
__device__ __forceinline__ void multiply_stage(float (&sum)[kRowTiles][4], uint32_t stage,
                                               int output_warp, int half, int lane) {
  const int a_row = output_warp * 16 + (lane & 15);
  const uint32_t x_rows = stage + kWeightBytes;
#pragma unroll
  for (int s = 0; s < kSteps; s += 2) {
    const int piece = (half * kSteps + s) * 2;
    uint32_t a[2][4];
    load_matrices(a[0], stage + piece_offset(a_row, piece + (lane >> 4)));
    load_matrices(a[1], stage + piece_offset(a_row, piece + 2 + (lane >> 4)));
    if constexpr (kRowTiles == 1) {
      uint32_t b[4];  // two steps of 8 rows
      load_matrices(b, x_rows + piece_offset(lane & 7, piece + (lane >> 3)));
      multiply_add<Element>(sum[0], a[0], b[0], b[1]);
      multiply_add<Element>(sum[0], a[1], b[2], b[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t b[4];  // one step of 16 rows
        const int row = (lane & 7) + ((lane >> 4) << 3);
        load_matrices(b, x_rows + piece_offset(row, piece + 2 * j + ((lane >> 3) & 1)));
        multiply_add<Element>(sum[0], a[j], b[0], b[1]);
        multiply_add<Element>(sum[1], a[j], b[2], b[3]);
      }
    }
  }
}

// A warp's sums to out[split][row][output].
template <int kRowTiles>
__device__ __forceinline__ void store(const Work& w, int32_t item, const float (&sum)[kRowTiles][4],
                                      int output_warp, int lane) {
  float* part = w.out + static_cast<int64_t>(item % w.splits) * w.rows * w.num_outputs;
  const int64_t first =
      static_cast<int64_t>(item / w.splits) * kSkinnyTileOutputs + output_warp * 16 + lane / 4;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = t * 8 + lane % 4 * 2 + (i & 1);
      const int64_t output = first + (i >> 1) * 8;
      if (row < w.rows && output < w.num_outputs) part[row * w.num_outputs + output] = sum[t][i];
    }
  }
}

template <typename Element, int kRowTiles, int kStages>
__global__ void __launch_bounds__(kThreads, 2) skinny_kernel(const __grid_constant__ Work w) {
  constexpr int kStageBytes = kWeightBytes + kRowTiles * 8 * kRowBytes;
  extern __shared__ __align__(128) std::byte shared[];
  const uint32_t ring = shared_address(shared);
  float* const other_half = reinterpret_cast<float*>(shared + kStages * kStageBytes);

  launch_dependents();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int output_warp = warp % kOutputWarps, half = warp / kOutputWarps;
  const Copier copier;

  // Weights do not depend on the kernel before: the ring is filled while that one still runs.
  Cursor produced(w);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (produced.valid(w)) {
      copier.weights(w, produced, ring + s * kStageBytes);
      produced.advance(w);
    }
    copy_async_commit();
  }
  wait_for_predecessor();
  // x of these stages goes through registers: an asynchronous copy would complete only after all
  // the weights asked for before it.
  {
    uint4 x[kStages - 1];
    Cursor at(w);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      x[s] = at.valid(w) ? copier.load_x(w, at) : uint4{0, 0, 0, 0};
      if (at.valid(w)) at.advance(w);
    }
    if (copier.row < w.rows) {
#pragma unroll
      for (int s = 0; s < kStages - 1; ++s) {
        *reinterpret_cast<uint4*>(shared + s * kStageBytes + kWeightBytes + copier.offset) = x[s];
      }
    }
  }

  float sum[kRowTiles][4] = {};
  uint32_t stage = 0, free_stage = kStages - 1;
  for (Cursor at(w); at.valid(w);) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // this stage is there for all; the one before it has been read by all
    if (produced.valid(w)) {
      copier.weights(w, produced, ring + free_stage * kStageBytes);
      copier.x(w, produced, ring + free_stage * kStageBytes);
      produced.advance(w);
    }
    copy_async_commit();  // empty at the end, so that the count of groups goes on
    multiply_stage<Element, kRowTiles>(sum, ring + stage * kStageBytes, output_warp, half, lane);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;

    if (at.at_last_chunk()) {
      float* const exchange = other_half + output_warp * kRowTiles * 4 * 32 + lane;
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) exchange[i * 32] = sum[i / 4][i % 4];
      }
      __syncthreads();  // the next write there comes after the next stage's barrier
      if (half == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles * 4; ++i) sum[i / 4][i % 4] += exchange[i * 32];
        store<kRowTiles>(w, at.item, sum, output_warp, lane);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles * 4; ++i) sum[i / 4][i % 4] = 0;
    }
    at.advance(w);
  }
}

template <typename Element, int kRowTiles, int kStages>
void launch_skinny(const Work& work, int32_t grid, cudaStream_t stream) {
  constexpr auto kernel = skinny_kernel<Element, kRowTiles, kStages>;
  constexpr int kSharedBytes = kStages * (kWeightBytes + kRowTiles * 8 * kRowBytes) +
                               kRowTiles * 8 * kSkinnyTileOutputs * int{sizeof(float)};
  static const bool ready = [] {
    CLO_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    // All of it, so that another kernel's blocks fit beside ours: a multiprocessor changes its
    // split of L1 and shared memory only when it is idle.
    CLO_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
    return true;
  }();
  (void)ready;
  launch(kernel, dim3(static_cast<unsigned>(grid)), dim3(kThreads), kSharedBytes, stream, work);
}

}  // namespace

void skinny_linear(const SkinnyLinear& params, const SkinnyPlan& plan, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1 && params.rows <= kSkinnyRows, params.rows);
  CLO_CHECK(plan.tile_outputs == kSkinnyTileOutputs, plan.tile_outputs);
  const int64_t chunks = (params.num_inputs + kSkinnyStageInputs - 1) / kSkinnyStageInputs;
  const Work work = {.weight = static_cast<const std::byte*>(params.weight),
                     .x = static_cast<const std::byte*>(params.x),
                     .out = params.out,
                     .num_outputs = params.num_outputs,
                     .row_bytes = 2 * params.num_inputs,
                     .rows = params.rows,
                     .splits = plan.splits,
                     .split_chunks = static_cast<int32_t>(plan.split_inputs / kSkinnyStageInputs),
                     .chunks = static_cast<int32_t>(chunks),
                     .items = static_cast<int32_t>(skinny_items(plan, params.num_outputs))};
  with_element(params.type, [&]<typename Element>(Element) {
    // A plan for more rows serves fewer; its ring is the one that fits.
    if (params.rows <= 8 && plan.stages == 8) {
      launch_skinny<Element, 1, 8>(work, plan.grid, stream);
    } else if (params.rows <= 8 && plan.stages == 7) {
      launch_skinny<Element, 1, 7>(work, plan.grid, stream);
    } else if (params.rows <= 8 && plan.stages == 4) {
      launch_skinny<Element, 1, 4>(work, plan.grid, stream);
    } else if (plan.stages == 7) {
      launch_skinny<Element, 2, 7>(work, plan.grid, stream);
    } else {
      CLO_CHECK(plan.stages == 4, plan.stages, params.rows);
      launch_skinny<Element, 2, 4>(work, plan.grid, stream);
    }
  });
}

}  // namespace clo::kernels
