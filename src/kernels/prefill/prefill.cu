// A block takes 128 rows of one KV head, a row being (query token, query head of the group), so
// that the group shares each key tile and the diagonal crosses few of them. Four warps of 32 rows
// walk the tokens in tiles of 64: scores, online softmax and values stay in registers, K and V
// tiles come through a ring of two in shared memory. Blocks with the most tokens start first.
#include <cmath>
#include <cstdint>

#include "base/check.h"
#include "kernels/decode_tables.h"
#include "kernels/launch.cuh"
#include "kernels/prefill/prefill.h"
#include "kernels/tensor_core.cuh"

namespace clo::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kBlockRows = 128;
constexpr int kWarpRows = kBlockRows / kWarps;  // two 16-row matrix tiles: each K or V fragment
                                                // that is read from shared memory serves both
constexpr int kMTiles = kWarpRows / 16;
static_assert(kThreads == kBlockRows, "one thread per row notes what the row attends");
constexpr int kTileKeys = 64;
constexpr int kStages = 2;

struct KernelParams {
  const std::byte* queries;
  const std::byte* layer_rows;
  std::byte* out;
  int64_t head_rows_bytes;    // of one KV head in the layer buffer
  int64_t query_token_bytes;  // num_q_heads * head_dim elements
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t first_token;
  int32_t num_rows;       // num_tokens * group_size
  int32_t num_row_tiles;  // of one KV head
  float scale_log2;       // scale * log2(e): scores are kept in base 2
};

// Shared memory holds tiles of [rows][head_dim] elements. The 16-byte piece c of row r lies at
// piece c ^ (r mod 8), so that eight rows of one piece, which is what ldmatrix reads, are in eight
// different bank groups.
template <int kHeadDim>
struct Tiles {
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kQueryBytes = kBlockRows * kRowBytes;
  static constexpr int kTileBytes = kTileKeys * kRowBytes;  // of K or of V
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kVisibleBytes = kBlockRows * 4;
  static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes + kVisibleBytes;
};

// 16 bytes to shared memory; with `bytes` 0 nothing is read and zeros are written.
__device__ __forceinline__ void copy_async(uint32_t target, const std::byte* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async(uint32_t target, const std::byte* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four lanes that share a row of an accumulator tile.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2) prefill_kernel(const KernelParams p) {
  using T = Tiles<kHeadDim>;
  constexpr int kDepthSteps = kHeadDim / 16;  // of the query-key product
  constexpr int kKeyTiles = kTileKeys / 8;    // 8-column tiles of the scores
  constexpr int kKeySteps = kTileKeys / 16;   // of the probability-value product
  constexpr int kValueTiles = kHeadDim / 8;   // 8-column tiles of the output
  extern __shared__ __align__(1024) std::byte shared[];

  launch_dependents();
  wait_for_predecessor();

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int kv_head = static_cast<int>(blockIdx.x) % p.num_kv_heads;
  const int row_tile = p.num_row_tiles - 1 - static_cast<int>(blockIdx.x) / p.num_kv_heads;
  const int first_row = row_tile * kBlockRows;
  const int last_row = min(first_row + kBlockRows, p.num_rows) - 1;
  // Tokens that some row of this block attends, and those that every row does.
  const int num_keys = p.first_token + last_row / p.group_size + 1;
  const int num_shared_keys = p.first_token + first_row / p.group_size + 1;
  const int num_tiles = (num_keys + kTileKeys - 1) / kTileKeys;

  const uint32_t query_tile = shared_address(shared);
  const uint32_t ring = query_tile + T::kQueryBytes;

  // Address of a row's query or output, this KV head's group being adjacent heads.
  const auto row_offset = [&](int row) {
    const int token = row / p.group_size;
    const int head = kv_head * p.group_size + (row - token * p.group_size);
    return token * p.query_token_bytes + static_cast<int64_t>(head) * T::kRowBytes;
  };

  {
    constexpr int kRowsPerPass = kThreads / T::kPieces;
    const int piece = thread % T::kPieces;
#pragma unroll
    for (int pass = 0; pass < kBlockRows / kRowsPerPass; ++pass) {
      const int r = pass * kRowsPerPass + thread / T::kPieces;
      const int row = first_row + r;
      const bool exists = row <= last_row;
      copy_async(query_tile + r * T::kRowBytes + ((piece ^ (r & 7)) * 16),
                 p.queries + (exists ? row_offset(row) : 0) + piece * 16, exists ? 16 : 0);
    }
  }

  // Tokens that each row attends. In shared memory, because the few tiles that the diagonal crosses
  // are not worth registers. Rows past the last stand in for it; they are not stored.
  int* const visible_keys =
      reinterpret_cast<int*>(shared + T::kQueryBytes + kStages * T::kStageBytes);
  visible_keys[thread] = p.first_token + min(first_row + thread, last_row) / p.group_size + 1;

  // A token row is K then V; consecutive threads take consecutive pieces of it.
  constexpr int kTokenBytes = 2 * T::kRowBytes;
  constexpr int kTokenPieces = kTokenBytes / 16;
  constexpr int kTokensPerPass = kThreads / kTokenPieces;
  constexpr int kPasses = kTileKeys / kTokensPerPass;
  const int load_token = thread / kTokenPieces;
  const int load_piece = thread % T::kPieces;
  const std::byte* head_rows = p.layer_rows + kv_head * p.head_rows_bytes;
  const uint32_t load_target = ring + thread % kTokenPieces / T::kPieces * T::kTileBytes +
                               load_token * T::kRowBytes + ((load_piece ^ load_token) * 16);
  const auto load_tile = [&](int tile) {
    const uint32_t stage_target = load_target + (tile % kStages) * T::kStageBytes;
    // Row pass * kTokensPerPass + load_token: its two parts share no bits, so neither do their
    // shares of the swizzle.
    const auto target = [&](int pass) {
      return (stage_target ^ ((pass * kTokensPerPass & 7) * 16)) +
             pass * kTokensPerPass * T::kRowBytes;
    };
    // Tokens are contiguous, so thread t's piece is the t-th of every pass.
    const std::byte* source =
        head_rows + static_cast<int64_t>(tile) * (kTileKeys * kTokenBytes) + thread * 16;
    const int present = num_keys - tile * kTileKeys;
    if (present >= kTileKeys) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        copy_async(target(pass), source + pass * kThreads * 16);
      }
    } else {
      // Past the last attended token lies what nobody has written: zeros instead, because a weight
      // of 0 times a NaN would still be NaN.
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const bool exists = pass * kTokensPerPass + load_token < present;
        copy_async(target(pass), exists ? source + pass * kThreads * 16 : p.layer_rows,
                   exists ? 16 : 0);
      }
    }
  };
  load_tile(0);

  // Fragment addresses of this lane, before the step's piece is XORed in. Tiles are aligned to
  // more than a row, so the XOR touches piece bits only.
  const uint32_t query_fragment = query_tile + (warp * kWarpRows + (lane & 15)) * T::kRowBytes +
                                  (((lane >> 4) ^ (lane & 7)) * 16);
  const uint32_t key_fragment =
      ((lane & 7) + ((lane >> 4) << 3)) * T::kRowBytes + ((((lane >> 3) & 1) ^ (lane & 7)) * 16);
  const uint32_t value_fragment =
      T::kTileBytes + (lane & 15) * T::kRowBytes + (((lane >> 4) ^ (lane & 7)) * 16);

  // Accumulators: element e of a tile is at row lane / 4 + 8 (e / 2), column 2 (lane mod 4) + e
  // mod 2.
  float output[kMTiles][kValueTiles][4] = {};
  // Of the raw scores. Every row attends token 0, so it is finite from the first tile on.
  float maximum[kMTiles][2];
  float sum[kMTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;

  for (int tile = 0; tile < num_tiles; ++tile) {
    wait_for_copies();
    __syncthreads();  // the tile is here for all, and all are done with the one before
    if (tile + 1 < num_tiles) load_tile(tile + 1);
    const uint32_t stage = ring + (tile % kStages) * T::kStageBytes;

    float score[kMTiles][kKeyTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kDepthSteps; ++step) {
      uint32_t query[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        load_matrices(query[m], (query_fragment ^ (step * 32)) + m * 16 * T::kRowBytes);
      }
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        uint32_t key[4];
        load_matrices(key, stage + (key_fragment ^ (step * 32)) + pair * 16 * T::kRowBytes);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          multiply_add<Element>(score[m][2 * pair], query[m], key[0], key[1]);
          multiply_add<Element>(score[m][2 * pair + 1], query[m], key[2], key[3]);
        }
      }
    }

    if ((tile + 1) * kTileKeys > num_shared_keys) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int visible = visible_keys[warp * kWarpRows + m * 16 + half * 8 + lane / 4] -
                              tile * kTileKeys - 2 * (lane & 3);
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            if (n * 8 >= visible) score[m][n][2 * half] = -INFINITY;
            if (n * 8 + 1 >= visible) score[m][n][2 * half + 1] = -INFINITY;
          }
        }
      }
    }

    bool moved = false;
    float correction[kMTiles][2];
    float offset[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = maximum[m][half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          highest = fmaxf(highest, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
        }
        highest = row_max(highest);
        moved |= highest != maximum[m][half];
        correction[m][half] = exp2_fast((maximum[m][half] - highest) * p.scale_log2);
        maximum[m][half] = highest;
        offset[m][half] = Element::kWeightShift - highest * p.scale_log2;
      }
    }
    // In a long context a new maximum is rare: most tiles skip the whole rescaling.
    if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        sum[m][0] *= correction[m][0];
        sum[m][1] *= correction[m][1];
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          output[m][n][0] *= correction[m][0];
          output[m][n][1] *= correction[m][0];
          output[m][n][2] *= correction[m][1];
          output[m][n][3] *= correction[m][1];
        }
      }
    }

#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      // The scores of two 8-key tiles are, element for element, the left operand of 16 keys.
      uint32_t weight[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int half = part & 1;
          const float* pair = &score[m][2 * step + part / 2][2 * half];
          const float low = exp2_fast(fmaf(pair[0], p.scale_log2, offset[m][half]));
          const float high = exp2_fast(fmaf(pair[1], p.scale_log2, offset[m][half]));
          sum[m][half] += low + high;
          weight[m][part] = Element::pack(low, high);
        }
      }
#pragma unroll
      for (int pair = 0; pair < kValueTiles / 2; ++pair) {
        uint32_t value[4];
        load_matrices_transposed(value,
                                 stage + (value_fragment ^ (pair * 32)) + step * 16 * T::kRowBytes);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          multiply_add<Element>(output[m][2 * pair], weight[m], value[0], value[1]);
          multiply_add<Element>(output[m][2 * pair + 1], weight[m], value[2], value[3]);
        }
      }
    }
  }

  // Through this warp's own rows of the query tile, which no other warp reads, to whole-row stores.
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = 1.0f / row_sum(sum[m][half]);
      const int r = warp * kWarpRows + m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        *reinterpret_cast<uint32_t*>(shared + r * T::kRowBytes + ((n ^ (r & 7)) * 16) +
                                     (lane & 3) * 4) =
            Element::pack(output[m][n][2 * half] * inverse, output[m][n][2 * half + 1] * inverse);
      }
    }
  }
  __syncwarp();
  constexpr int kRowsPerStore = 32 / T::kPieces;
#pragma unroll
  for (int pass = 0; pass < kWarpRows / kRowsPerStore; ++pass) {
    const int r = warp * kWarpRows + pass * kRowsPerStore + lane / T::kPieces;
    const int piece = lane % T::kPieces;
    const int row = first_row + r;
    if (row <= last_row) {
      *reinterpret_cast<uint4*>(p.out + row_offset(row) + piece * 16) =
          *reinterpret_cast<const uint4*>(shared + r * T::kRowBytes + ((piece ^ (r & 7)) * 16));
    }
  }
}

template <typename Element, int kHeadDim>
void launch_prefill(const KernelParams& params, cudaStream_t stream) {
  constexpr int kSharedBytes = Tiles<kHeadDim>::kSharedBytes;
  static const bool configured = [] {
    CLO_CUDA(cudaFuncSetAttribute(prefill_kernel<Element, kHeadDim>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    return true;
  }();
  (void)configured;
  // One dimension, because a long chunk has more row tiles than gridDim.y may have.
  const auto blocks = static_cast<unsigned>(params.num_row_tiles * params.num_kv_heads);
  launch(prefill_kernel<Element, kHeadDim>, dim3(blocks), dim3(kThreads), kSharedBytes, stream,
         params);
}

}  // namespace

double prefill_attention_flops(const PrefillAttention& params) {
  const auto first = static_cast<double>(params.first_token);
  const auto count = static_cast<double>(params.num_tokens);
  const double pairs = count * first + count * (count + 1) / 2;
  return 4.0 * pairs * params.shape.head_dim * params.shape.num_q_heads;
}

void prefill_attention(const PrefillAttention& params, cudaStream_t stream) {
  const KvShape& shape = params.shape;
  const int64_t end_token = params.first_token + params.num_tokens;
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  CLO_CHECK(shape.num_kv_heads >= 1 && shape.num_q_heads % shape.num_kv_heads == 0 &&
                shape.group_size() >= 1 && shape.group_size() <= kMaxGroup,
            shape.num_q_heads, shape.num_kv_heads);
  CLO_CHECK(params.num_tokens >= 1 && params.first_token >= 0 && end_token <= params.layer_capacity,
            params.first_token, params.num_tokens, params.layer_capacity);
  CLO_CHECK(params.scale > 0, params.scale);
  // Indices of tokens, rows and blocks are 32-bit in the kernel, with a tile to spare; byte offsets
  // are 64-bit.
  const int64_t num_rows = params.num_tokens * shape.group_size();
  const int64_t num_row_tiles = (num_rows + kBlockRows - 1) / kBlockRows;
  CLO_CHECK(end_token <= INT32_MAX - kTileKeys && num_rows <= INT32_MAX - kBlockRows &&
                num_row_tiles * shape.num_kv_heads <= INT32_MAX,
            end_token, num_rows);

  KernelParams p = {};
  p.queries = static_cast<const std::byte*>(params.queries);
  p.layer_rows = params.layer_rows;
  p.out = static_cast<std::byte*>(params.out);
  p.head_rows_bytes = params.layer_capacity * shape.row_bytes();
  p.query_token_bytes = static_cast<int64_t>(shape.num_q_heads) * shape.head_dim * 2;
  p.num_kv_heads = shape.num_kv_heads;
  p.group_size = shape.group_size();
  p.first_token = static_cast<int32_t>(params.first_token);
  p.num_rows = static_cast<int32_t>(num_rows);
  p.num_row_tiles = static_cast<int32_t>(num_row_tiles);
  p.scale_log2 = params.scale * 1.4426950408889634f;
  with_element(shape.type, [&]<typename Element>(Element) {
    if (shape.head_dim == 64) {
      launch_prefill<Element, 64>(p, stream);
    } else {
      launch_prefill<Element, 128>(p, stream);
    }
  });
}

}  // namespace clo::kernels
