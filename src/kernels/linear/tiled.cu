// The weight-streaming product of skinny.cu with weights in tiles of codes. What differs: a tile is
// laid out as the lanes read it, so codes go from shared memory to operand registers in one load
// of 16 bytes a lane; and sums of a block of 32 inputs are scaled as they join the total.
//
// Of 4-bit weights w = scale q + minimum the minima meet the sum of x over the block, which a
// product with a matrix of ones gives in every lane that needs it. The operands are q plus a
// constant, which widening needs and which then leaves with the minimum: widening is what this
// kernel waits for.
#include "base/check.h"
#include "kernels/launch.cuh"
#include "kernels/linear/decode_codes.cuh"
#include "kernels/linear/tiles.h"
#include "kernels/tensor_core.cuh"

namespace clo::kernels {

namespace {

constexpr int kThreads = 256;
constexpr int kOutputWarps = 4;                            // along a block's outputs, a tile each
constexpr int kInputWarps = kThreads / 32 / kOutputWarps;  // share a stage's inputs
constexpr int kTilesAcross = 8;                            // of a stage
constexpr int kWarpTiles = kTilesAcross / kInputWarps;
constexpr int kPlainThreads = 256;
static_assert(kOutputWarps * kTileOutputs == kSkinnyTileOutputs);

struct Work {
  const std::byte* weight;
  const std::byte* x;  // first row
  float* out;          // of part 0, first row
  int64_t num_outputs;
  int64_t row_bytes;       // of x
  int64_t part_stride;     // elements of a part: total rows x outputs
  int64_t tile_row_bytes;  // 16 outputs of the matrix
  int32_t tile_rows;       // 16 outputs each
  int32_t rows;
  int32_t splits;
  int32_t split_chunks;
  int32_t chunks;  // stages along the inputs
  int32_t items;   // blocks of 64 outputs x splits
};

// A place in a block's sequence of stages: its items in turn, each item's chunks in turn.
struct Cursor {
  int32_t item, chunk, end;
  int32_t tile_row;  // first of the item's tiles

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
    const int32_t block =
        item / w.splits;  // a division is a score of instructions: not every stage
    tile_row = block * kOutputWarps;
    chunk = (item - block * w.splits) * w.split_chunks;
    end = min(chunk + w.split_chunks, w.chunks);
  }
};

template <WeightBlocks kBlocks, int kRowTiles>
struct Stage {
  static constexpr int kTileBytes = tile_bytes(kBlocks);
  static constexpr int kStripBytes = kTilesAcross * kTileBytes;  // one tile of outputs
  static constexpr int kWeightBytes = kOutputWarps * kStripBytes;
  static constexpr int kXRowBytes = 2 * kTilesAcross * tile_inputs(kBlocks);
  static constexpr int kXBytes = kRowTiles * 8 * kXRowBytes;
  static constexpr int kBytes = kWeightBytes + kXBytes;
  static constexpr int kStripPieces = kStripBytes / 16, kXPieces = kXRowBytes / 16;
  static constexpr int kXEach = (kXBytes / 16 + kThreads - 1) / kThreads;  // of one thread

  // Rows of x under each other; piece p of row r is found at p ^ (r % 8), so that the eight rows of
  // a matrix that ldmatrix reads fall into different banks.
  static __device__ __forceinline__ uint32_t x_offset(int row, int piece) {
    return kWeightBytes + static_cast<uint32_t>(row * kXRowBytes + ((piece ^ (row & 7)) << 4));
  }

  // What one thread copies of a stage: pieces thread, thread + kThreads, ... of its four strips.
  // Their places do not change from stage to stage, only where the stage begins.
  static constexpr int kPieces = kOutputWarps * kStripPieces;
  static constexpr int kEach = (kPieces + kThreads - 1) / kThreads;
  struct Copier {
    int32_t offset[kEach];  // bytes from the stage's first tile, strip after strip

    __device__ explicit Copier(const Work& w) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int piece = threadIdx.x + i * kThreads;
        offset[i] = piece / kStripPieces * static_cast<int32_t>(w.tile_row_bytes) +
                    piece % kStripPieces * 16;
      }
    }
    __device__ __forceinline__ void weights(const Work& w, const Cursor& at, uint32_t stage) const {
      const int64_t column = static_cast<int64_t>(at.chunk) * kStripBytes;
      const std::byte* const first = w.weight + at.tile_row * w.tile_row_bytes + column;
      const uint32_t target = stage + threadIdx.x * 16;
      if (at.tile_row + kOutputWarps <= w.tile_rows && column + kStripBytes <= w.tile_row_bytes) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if ((i + 1) * kThreads <= kPieces || threadIdx.x + i * kThreads < kPieces) {
            copy_async_16(target + i * kThreads * 16, first + offset[i], true);
          }
        }
        return;
      }
      // Past the last output or input: zeros, and nothing is read.
      for (int i = 0; i < kEach; ++i) {
        const int piece = threadIdx.x + i * kThreads;
        if (piece >= kPieces) break;
        const bool valid = at.tile_row + piece / kStripPieces < w.tile_rows &&
                           column + piece % kStripPieces * 16 < w.tile_row_bytes;
        copy_async_16(target + i * kThreads * 16, valid ? first + offset[i] : w.weight, valid);
      }
    }
  };
  // Calls visit(row, bytes into the row of x, target offset in the stage) for this thread's pieces.
  template <typename Visit>
  static __device__ __forceinline__ void each_x(const Cursor& at, const Visit& visit) {
#pragma unroll
    for (int i = 0; i < kXEach; ++i) {
      const int piece = threadIdx.x + i * kThreads;
      if (kXBytes / 16 % kThreads != 0 && piece >= kXBytes / 16) break;
      const int row = piece / kXPieces, of_row = piece % kXPieces;
      visit(i, row, static_cast<int64_t>(at.chunk) * kXRowBytes + of_row * 16,
            x_offset(row, of_row));
    }
  }
  static __device__ void copy_x(const Work& w, const Cursor& at, uint32_t stage) {
    each_x(at, [&](int, int row, int64_t column, uint32_t target) {
      if (row >= w.rows) return;
      const bool valid = column < w.row_bytes;
      copy_async_16(stage + target, w.x + (valid ? row * w.row_bytes + column : 0), valid);
    });
  }
  static __device__ void load_x(const Work& w, const Cursor& at, uint4 (&x)[kXEach]) {
    each_x(at, [&](int i, int row, int64_t column, uint32_t) {
      x[i] = row < w.rows && column < w.row_bytes
                 ? *reinterpret_cast<const uint4*>(w.x + row * w.row_bytes + column)
                 : uint4{0, 0, 0, 0};
    });
  }
  static __device__ void store_x(const Cursor& at, const uint4 (&x)[kXEach], std::byte* stage) {
    each_x(at, [&](int i, int, int64_t, uint32_t target) {
      *reinterpret_cast<uint4*>(stage + target) = x[i];
    });
  }
};

// The right operands of 32 inputs from piece `piece` of x on, for one tile of 8 rows.
template <typename S>
__device__ __forceinline__ void load_x_operands(uint32_t (&b)[4], uint32_t stage, int row_tile,
                                                int piece, int lane) {
  load_matrices(b, stage + S::x_offset(row_tile * 8 + (lane & 7), piece + (lane >> 3)));
}

__device__ __forceinline__ float2 pair_at(const std::byte* at) {
  return __half22float2(*reinterpret_cast<const __half2*>(at));
}

// sum[t] += scale x partial (+ minimum x sums of x): columns share, rows g and g + 8 differ.
__device__ __forceinline__ void add_scaled(float (&sum)[4], const float (&partial)[4],
                                           float2 scale) {
  sum[0] = fmaf(scale.x, partial[0], sum[0]);
  sum[1] = fmaf(scale.x, partial[1], sum[1]);
  sum[2] = fmaf(scale.y, partial[2], sum[2]);
  sum[3] = fmaf(scale.y, partial[3], sum[3]);
}

// This warp's share of one stage.
template <WeightBlocks kBlocks, typename Element, int kRowTiles>
__device__ __forceinline__ void multiply_stage(float (&sum)[kRowTiles][4], const std::byte* stage,
                                               uint32_t stage_address, int output_warp, int part,
                                               int lane) {
  using S = Stage<kBlocks, kRowTiles>;
#pragma unroll
  for (int i = 0; i < kWarpTiles; ++i) {
    const int across = part * kWarpTiles + i;
    const std::byte* tile = stage + output_warp * S::kStripBytes + across * S::kTileBytes;
    const uint4 codes = reinterpret_cast<const uint4*>(tile)[lane];
    if constexpr (kBlocks == WeightBlocks::kInt8) {
      const float2 scale = pair_at(tile + kTileCodeBytes + lane / 4 * 4);
      uint32_t a[2][4];
      operand_of_bytes<Element>(a[0], codes.x, codes.y);
      operand_of_bytes<Element>(a[1], codes.z, codes.w);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        uint32_t b[4];
        load_x_operands<S>(b, stage_address, t, across * 4, lane);
        float partial[4] = {};
        multiply_add<Element>(partial, a[0], b[0], b[1]);
        multiply_add<Element>(partial, a[1], b[2], b[3]);
        add_scaled(sum[t], partial, scale);
      }
    } else {
      const uint32_t one_pair = Element::kType == DType::kBF16 ? 0x3F803F80u : 0x3C003C00u;
      const uint32_t ones[4] = {one_pair, one_pair, one_pair, one_pair};
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const std::byte* of_block = tile + kTileCodeBytes + 64 * block + lane / 4 * 8;
        const float2 scale = pair_at(of_block);
        float2 minimum = pair_at(of_block + 4);
        minimum.x = fmaf(-nibble_base<Element>, scale.x, minimum.x);
        minimum.y = fmaf(-nibble_base<Element>, scale.y, minimum.y);
        uint32_t a[2][4];
        operand_of_nibbles<Element>(a[0], block == 0 ? codes.x : codes.z);
        operand_of_nibbles<Element>(a[1], block == 0 ? codes.y : codes.w);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          uint32_t b[4];
          load_x_operands<S>(b, stage_address, t, across * 8 + block * 4, lane);
          float partial[4] = {}, total[4] = {};
          multiply_add<Element>(partial, a[0], b[0], b[1]);
          multiply_add<Element>(partial, a[1], b[2], b[3]);
          multiply_add<Element>(total, ones, b[0], b[1]);
          multiply_add<Element>(total, ones, b[2], b[3]);
          add_scaled(sum[t], partial, scale);
          add_scaled(sum[t], total, minimum);
        }
      }
    }
  }
}

// A warp's sums to out[split][row][output].
template <int kRowTiles>
__device__ __forceinline__ void store(const Work& w, int32_t item, const float (&sum)[kRowTiles][4],
                                      int output_warp, int lane) {
  float* part = w.out + static_cast<int64_t>(item % w.splits) * w.part_stride;
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

template <WeightBlocks kBlocks, typename Element, int kRowTiles, int kStages>
__global__ void __launch_bounds__(kThreads, 2) tiled_kernel(const __grid_constant__ Work w) {
  using S = Stage<kBlocks, kRowTiles>;
  extern __shared__ __align__(128) std::byte shared[];
  const uint32_t ring = shared_address(shared);
  float* const other_parts = reinterpret_cast<float*>(shared + kStages * S::kBytes);
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int output_warp = warp % kOutputWarps, part = warp / kOutputWarps;

  const typename S::Copier copier(w);

  // Weights do not depend on the kernel before: the ring is filled while that one still runs.
  Cursor produced(w);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (produced.valid(w)) {
      copier.weights(w, produced, ring + s * S::kBytes);
      produced.advance(w);
    }
    copy_async_commit();
  }
  wait_for_predecessor();
  // x of these stages goes through registers: an asynchronous copy would complete only after all
  // the weights asked for before it.
  {
    Cursor at(w);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (!at.valid(w)) break;
      uint4 x[S::kXEach];
      S::load_x(w, at, x);
      S::store_x(at, x, shared + s * S::kBytes);
      at.advance(w);
    }
  }

  float sum[kRowTiles][4] = {};
  uint32_t stage = 0, free_stage = kStages - 1;
  for (Cursor at(w); at.valid(w);) {
    copy_async_wait<kStages - 2>();
    __syncthreads();  // this stage is there for all; the one before it has been read by all
    if (produced.valid(w)) {
      copier.weights(w, produced, ring + free_stage * S::kBytes);
      S::copy_x(w, produced, ring + free_stage * S::kBytes);
      produced.advance(w);
    }
    copy_async_commit();  // empty at the end, so that the count of groups goes on
    multiply_stage<kBlocks, Element, kRowTiles>(sum, shared + stage * S::kBytes,
                                                ring + stage * S::kBytes, output_warp, part, lane);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;

    if (at.at_last_chunk()) {
      constexpr int kSums = kRowTiles * 4;
      const auto exchange = [&](int of_part, int i) -> float& {
        return other_parts[(((of_part - 1) * kOutputWarps + output_warp) * kSums + i) * 32 + lane];
      };
      if (part > 0) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) exchange(part, i) = sum[i / 4][i % 4];
      }
      __syncthreads();  // the next write there comes after the next stage's barrier
      if (part == 0) {
#pragma unroll
        for (int p = 1; p < kInputWarps; ++p) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) sum[i / 4][i % 4] += exchange(p, i);
        }
        store<kRowTiles>(w, at.item, sum, output_warp, lane);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles * 4; ++i) sum[i / 4][i % 4] = 0;
    }
    at.advance(w);
  }
}

template <WeightBlocks kBlocks, typename Element, int kRowTiles, int kStages>
void launch_tiled(const Work& work, int32_t grid, cudaStream_t stream) {
  constexpr auto kernel = tiled_kernel<kBlocks, Element, kRowTiles, kStages>;
  constexpr int kSharedBytes =
      kStages * Stage<kBlocks, kRowTiles>::kBytes +
      (kInputWarps - 1) * kRowTiles * 8 * kSkinnyTileOutputs * int{sizeof(float)};
  static const bool ready = [] {
    CLO_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    return true;
  }();
  (void)ready;
  launch(kernel, dim3(static_cast<unsigned>(grid)), dim3(kThreads), kSharedBytes, stream, work);
}

// A warp a tile: every lane writes its operand's pairs.
template <WeightBlocks kBlocks, typename Element>
__global__ void __launch_bounds__(kPlainThreads)
    expand_kernel(const std::byte* weight, uint32_t* out, int64_t num_outputs, int64_t num_inputs,
                  int64_t across, int64_t tiles) {
  launch_dependents();
  wait_for_predecessor();
  const int lane = threadIdx.x % 32;
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * kPlainThreads + threadIdx.x) / 32;
  if (tile >= tiles) return;
  const std::byte* at = weight + tile * tile_bytes(kBlocks);
  const uint4 codes = reinterpret_cast<const uint4*>(at)[lane];
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const int64_t first_output = tile / across * kTileOutputs + lane / 4;
  const int64_t first_input = tile % across * tile_inputs(kBlocks) + lane % 4 * 2;
  constexpr int kSteps = tile_inputs(kBlocks) / 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[4];
    float2 scale, minimum = {0, 0};
    if constexpr (kBlocks == WeightBlocks::kInt8) {
      operand_of_bytes<Element>(a, words[2 * step], words[2 * step + 1]);
      scale = pair_at(at + kTileCodeBytes + lane / 4 * 4);
    } else {
      operand_of_nibbles<Element>(a, words[step]);
      const std::byte* of_block = at + kTileCodeBytes + 64 * (step / 2) + lane / 4 * 8;
      scale = pair_at(of_block);
      minimum = pair_at(of_block + 4);
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int64_t output = first_output + p % 2 * 8;
      const int64_t input = first_input + step * 16 + p / 2 * 8;
      if (output >= num_outputs || input >= num_inputs) continue;
      float2 q = Element::unpack(a[p]);
      if constexpr (kBlocks == WeightBlocks::kQ4) {
        q.x -= nibble_base<Element>;
        q.y -= nibble_base<Element>;
      }
      const float s = p % 2 == 0 ? scale.x : scale.y, m = p % 2 == 0 ? minimum.x : minimum.y;
      // As the CPU's unpack: a rounded product, then a rounded sum.
      out[(output * num_inputs + input) / 2] =
          Element::pack(__fadd_rn(__fmul_rn(s, q.x), m), __fadd_rn(__fmul_rn(s, q.y), m));
    }
  }
}

template <typename Function>
void with_blocks(WeightBlocks blocks, Function function) {
  CLO_CHECK(blocks == WeightBlocks::kInt8 || blocks == WeightBlocks::kQ4, static_cast<int>(blocks));
  if (blocks == WeightBlocks::kInt8) {
    function.template operator()<WeightBlocks::kInt8>();
  } else {
    function.template operator()<WeightBlocks::kQ4>();
  }
}

}  // namespace

void tiled_linear(const TiledLinear& params, const SkinnyPlan& plan, cudaStream_t stream) {
  CLO_CHECK(params.rows >= 1 && params.rows <= kSkinnyRows, params.rows);
  CLO_CHECK(params.first_row >= 0 && params.first_row + params.rows <= params.total_rows,
            params.first_row, params.rows, params.total_rows);
  CLO_CHECK(params.num_inputs % kBlockInputs == 0, params.num_inputs);
  CLO_CHECK(plan.tile_outputs == kSkinnyTileOutputs, plan.tile_outputs);
  const int64_t stage_inputs = tiled_stage_inputs(params.blocks);
  Work work = {};
  work.weight = static_cast<const std::byte*>(params.weight);
  work.row_bytes = 2 * params.num_inputs;
  work.x = static_cast<const std::byte*>(params.x) + params.first_row * work.row_bytes;
  work.out = params.out + params.first_row * params.num_outputs;
  work.num_outputs = params.num_outputs;
  work.part_stride = params.total_rows * params.num_outputs;
  work.tile_row_bytes = tiles_across(params.blocks, params.num_inputs) * tile_bytes(params.blocks);
  work.tile_rows = static_cast<int32_t>((params.num_outputs + kTileOutputs - 1) / kTileOutputs);
  work.rows = params.rows;
  work.splits = plan.splits;
  work.split_chunks = static_cast<int32_t>(plan.split_inputs / stage_inputs);
  work.chunks = static_cast<int32_t>((params.num_inputs + stage_inputs - 1) / stage_inputs);
  work.items = static_cast<int32_t>(skinny_items(plan, params.num_outputs));
  const auto run = [&]<WeightBlocks kBlocks, typename Element, int kRowTiles>() {
    // The rings of plan_tiled_linear.
    constexpr int kDeep = tiled_stages(kBlocks, kRowTiles, true);
    constexpr int kSmall = tiled_stages(kBlocks, kRowTiles, false);
    // A plan for more rows serves fewer: their deep ring fits where that of more does.
    constexpr int64_t kSmallBytes = int64_t{100} << 10;
    if (plan.shared_bytes > kSmallBytes) {
      launch_tiled<kBlocks, Element, kRowTiles, kDeep>(work, plan.grid, stream);
    } else {
      launch_tiled<kBlocks, Element, kRowTiles, kSmall>(work, plan.grid, stream);
    }
  };
  with_element(params.type, [&]<typename Element>(Element) {
    with_blocks(params.blocks, [&]<WeightBlocks kBlocks>() {
      if (params.rows <= 8) {
        run.template operator()<kBlocks, Element, 1>();
      } else {
        run.template operator()<kBlocks, Element, 2>();
      }
    });
  });
}

void expand_tiles(const ExpandTiles& params, cudaStream_t stream) {
  CLO_CHECK(params.num_inputs % kBlockInputs == 0, params.num_inputs);
  const int64_t across = tiles_across(params.blocks, params.num_inputs);
  const int64_t tiles = (params.num_outputs + kTileOutputs - 1) / kTileOutputs * across;
  const auto blocks = static_cast<unsigned>((tiles * 32 + kPlainThreads - 1) / kPlainThreads);
  with_element(params.type, [&]<typename Element>(Element) {
    with_blocks(params.blocks, [&]<WeightBlocks kBlocks>() {
      launch(expand_kernel<kBlocks, Element>, dim3(blocks), dim3(kPlainThreads), 0, stream,
             static_cast<const std::byte*>(params.weight), static_cast<uint32_t*>(params.out),
             params.num_outputs, params.num_inputs, across, tiles);
    });
  });
}

}  // namespace clo::kernels
