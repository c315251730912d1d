#include <algorithm>

#include "base/check.h"
#include "base/units.h"
#include "kernels/launch.cuh"
#include "kernels/train/tile_product.cuh"
#include "kernels/train/train.h"

namespace clo::kernels {

namespace {

constexpr int kWarp = 32;

__device__ __forceinline__ float4 read4(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}
__device__ __forceinline__ void write4(float* p, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
}

// Key or query of a column of the batch. [width]
__device__ __forceinline__ const float* input_row(const HashTrainStep& p, int head, int column) {
  if (column < p.num_keys) {
    return p.keys + head * p.head_keys + static_cast<int64_t>(column) * p.width;
  }
  const int64_t step = p.steps[column - p.num_keys];
  return p.queries + head * p.head_queries + step * p.width;
}
__device__ __forceinline__ float* codes_of(const HashTrainStep& p, int head) {
  return p.codes + head * p.num_columns() * p.bits;
}

using SquareTile = ProductTile<64, 64>;
using TallTile = ProductTile<256, kBatchQueries>;

// Block (tile of columns, tile of bits, head).
__global__ void __launch_bounds__(SquareTile::kThreads)
    encode_kernel(const __grid_constant__ HashTrainStep p) {
  launch_dependents();
  wait_for_predecessor();
  __shared__ SquareTile::Shared shared;
  const int head = static_cast<int>(blockIdx.z);
  const int column0 = static_cast<int>(blockIdx.x) * SquareTile::kRows;
  const int bit0 = static_cast<int>(blockIdx.y) * SquareTile::kColumns;
  const int columns = static_cast<int>(p.num_columns());
  const float* weights = p.weights + (static_cast<int64_t>(head) * p.bits + bit0) * p.width;
  float sums[8][4];
  tile_product<SquareTile, true>(
      shared, p.width,
      [&](int row, int depth) {
        const int column = column0 + row;
        return column < columns ? read4(input_row(p, head, column) + depth) : float4{};
      },
      [&](int row, int depth) {
        return read4(weights + static_cast<int64_t>(row) * p.width + depth);
      },
      sums);
  const int row = 8 * (static_cast<int>(threadIdx.x) / 16), bit = 4 * (threadIdx.x % 16);
  float* out = codes_of(p, head) + bit0 + bit;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int column = column0 + row + i;
    if (column >= columns) break;
    float* const at = out + static_cast<int64_t>(column) * p.bits;
    if (column < p.num_keys) {
      write4(at, relaxed_sign(sums[i][0]), relaxed_sign(sums[i][1]), relaxed_sign(sums[i][2]),
             relaxed_sign(sums[i][3]));
    } else {
      write4(at, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    }
  }
}

// Block (tile of keys, head).
__global__ void __launch_bounds__(TallTile::kThreads)
    score_kernel(const __grid_constant__ HashTrainStep p) {
  launch_dependents();
  wait_for_predecessor();
  __shared__ TallTile::Shared shared;
  const int head = static_cast<int>(blockIdx.y);
  const int key0 = static_cast<int>(blockIdx.x) * TallTile::kRows;
  const float* codes = codes_of(p, head);
  const float* queries = codes + static_cast<int64_t>(p.num_keys) * p.bits;
  float sums[8][4];
  tile_product<TallTile, true>(
      shared, p.bits,
      [&](int row, int depth) {
        const int key = key0 + row;
        return key < p.num_keys ? read4(codes + static_cast<int64_t>(key) * p.bits + depth)
                                : float4{};
      },
      [&](int query, int depth) {
        return read4(queries + static_cast<int64_t>(query) * p.bits + depth);
      },
      sums);
  const int key = key0 + 8 * (static_cast<int>(threadIdx.x) / (kBatchQueries / 4));
  const int query = 4 * (threadIdx.x % (kBatchQueries / 4));
  if (key >= p.num_keys) return;  // keys are a multiple of 16, so all eight are in or out
  float* out = p.scores + (static_cast<int64_t>(head) * kBatchQueries + query) * p.num_keys + key;
#pragma unroll
  for (int j = 0; j < 4; ++j, out += p.num_keys) {
    write4(out, sums[0][j], sums[1][j], sums[2][j], sums[3][j]);
    write4(out + 4, sums[4][j], sums[5][j], sums[6][j], sums[7][j]);
  }
}

constexpr int kPullWarps = 4;
constexpr int kKeysOfLane = (kMostBatchKeys + kWarp - 1) / kWarp;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  }
  return value;
}

// A warp for each query of a head; lane l has keys l, l + 32 and so on.
__global__ void __launch_bounds__(kPullWarps* kWarp)
    pull_kernel(const __grid_constant__ HashTrainStep p) {
  launch_dependents();
  wait_for_predecessor();
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % kWarp;
  const int query =
      static_cast<int>(blockIdx.x) * kPullWarps + static_cast<int>(threadIdx.x) / kWarp;
  float* scores = p.scores + (static_cast<int64_t>(head) * kBatchQueries + query) * p.num_keys;
  const uint64_t* labels = p.labels + head * p.head_labels + p.steps[query] * p.label_words;

  uint32_t ordered[kKeysOfLane];  // 0 outside: below every number
  uint32_t is_wanted = 0;         // bit i: key lane + 32 i
  unsigned wanted = 0;
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int key = lane + kWarp * i;
    ordered[i] = 0;
    if (key >= p.num_keys) continue;
    ordered[i] = ordered_bits(scores[key]);
    const int64_t at = p.first_key + key;
    const auto label = static_cast<uint32_t>((labels[at / 64] >> (at % 64)) & 1u);
    is_wanted |= label << i;
    wanted += label;
  }
  wanted = __reduce_add_sync(0xFFFFFFFFu, wanted);
  const bool nothing = wanted == 0 || wanted == static_cast<unsigned>(p.num_keys);

  // The score of rank `wanted`, from 0: the largest number that more than `wanted` scores reach.
  uint32_t boundary_bits = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t tried = boundary_bits | (1u << bit);
    unsigned reach = 0;
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) reach += ordered[i] >= tried;
    if (__reduce_add_sync(0xFFFFFFFFu, reach) > wanted) boundary_bits = tried;
  }
  const float boundary = from_ordered_bits(boundary_bits);

  const float unit = 1 / static_cast<float>(p.bits);
  float wanted_pull = 0, other_pull = 0;
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    if (lane + kWarp * i >= p.num_keys) continue;
    const bool label = ((is_wanted >> i) & 1u) != 0;
    const float pull = boundary_pull(from_ordered_bits(ordered[i]), boundary, label, unit);
    (label ? wanted_pull : other_pull) += pull;
    ordered[i] = __float_as_uint(label ? -pull : pull);
  }
  wanted_pull = warp_sum(wanted_pull);
  other_pull = warp_sum(other_pull);
  // The boundary moves with the scores, so nothing is won by moving all of them: both sides pull
  // equally.
  const float of_wanted = nothing ? 0 : 1 / static_cast<float>(wanted);
  const float of_others = of_wanted * wanted_pull / (other_pull > 1e-20f ? other_pull : 1e-20f);
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int key = lane + kWarp * i;
    if (key >= p.num_keys) continue;
    const bool label = ((is_wanted >> i) & 1u) != 0;
    scores[key] = nothing ? 0 : __uint_as_float(ordered[i]) * (label ? of_wanted : of_others);
  }
}

// Block (32 bits, head): a warp has a key's 32 bits, a lane one bit of every eighth key.
constexpr int kBackWarps = 8;
constexpr int kBackKeys = 64;
constexpr int kSlopePitch = kBatchQueries + 4;

__global__ void __launch_bounds__(kBackWarps* kWarp)
    back_kernel(const __grid_constant__ HashTrainStep p) {
  launch_dependents();
  wait_for_predecessor();
  __shared__ alignas(16) float slopes[kBackKeys][kSlopePitch];  // of the loss, by key and query
  __shared__ float parts[kBackWarps][kBatchQueries][kWarp];
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int bit = static_cast<int>(blockIdx.x) * kWarp + lane;
  float* codes = codes_of(p, head) + bit;
  float* queries = codes + static_cast<int64_t>(p.num_keys) * p.bits;
  const float* scores = p.scores + static_cast<int64_t>(head) * kBatchQueries * p.num_keys;

  float asked[kBatchQueries], pulled[kBatchQueries];
#pragma unroll
  for (int q = 0; q < kBatchQueries; ++q) {
    asked[q] = queries[static_cast<int64_t>(q) * p.bits];
    pulled[q] = 0;
  }
  for (int first = 0; first < p.num_keys; first += kBackKeys) {
    __syncthreads();  // all have read the last tile
    {
      const int q = thread / (kBackKeys / 4), k = 4 * (thread % (kBackKeys / 4));
      const float4 v = first + k < p.num_keys
                           ? read4(scores + static_cast<int64_t>(q) * p.num_keys + first + k)
                           : float4{};
      slopes[k][q] = v.x;
      slopes[k + 1][q] = v.y;
      slopes[k + 2][q] = v.z;
      slopes[k + 3][q] = v.w;
    }
    __syncthreads();
#pragma unroll 4
    for (int k = warp; k < kBackKeys; k += kBackWarps) {
      if (first + k >= p.num_keys) break;
      float* const code = codes + static_cast<int64_t>(first + k) * p.bits;
      const float h = *code;
      float sum = 0;
#pragma unroll
      for (int q = 0; q < kBatchQueries; q += 4) {
        const float4 s = read4(&slopes[k][q]);
        sum += s.x * asked[q];
        sum += s.y * asked[q + 1];
        sum += s.z * asked[q + 2];
        sum += s.w * asked[q + 3];
        pulled[q] += h * s.x;
        pulled[q + 1] += h * s.y;
        pulled[q + 2] += h * s.z;
        pulled[q + 3] += h * s.w;
      }
      *code = sum * relaxed_slope(h);
    }
  }
#pragma unroll
  for (int q = 0; q < kBatchQueries; ++q) parts[warp][q][lane] = pulled[q];
  __syncthreads();  // also: every thread has read its projections
  for (int q = warp; q < kBatchQueries; q += kBackWarps) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kBackWarps; ++w) sum += parts[w][q][lane];
    queries[static_cast<int64_t>(q) * p.bits] = sum;
  }
}

// Block (tile of bits, tile of dimensions, head).
__global__ void __launch_bounds__(SquareTile::kThreads)
    update_kernel(const __grid_constant__ HashTrainStep p) {
  launch_dependents();
  wait_for_predecessor();
  __shared__ SquareTile::Shared shared;
  const int head = static_cast<int>(blockIdx.z);
  const int bit0 = static_cast<int>(blockIdx.x) * SquareTile::kRows;
  const int dim0 = static_cast<int>(blockIdx.y) * SquareTile::kColumns;
  const float* codes = codes_of(p, head) + bit0;
  float sums[8][4];
  tile_product<SquareTile, false>(
      shared, static_cast<int>(p.num_columns()),
      [&](int bit, int column) {
        return read4(codes + static_cast<int64_t>(column) * p.bits + bit);
      },
      [&](int d, int column) {
        return dim0 + d < p.width ? read4(input_row(p, head, column) + dim0 + d) : float4{};
      },
      sums);
  const int row = 8 * (static_cast<int>(threadIdx.x) / 16), d = dim0 + 4 * (threadIdx.x % 16);
  if (d >= p.width) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t at = (static_cast<int64_t>(head) * p.bits + bit0 + row + i) * p.width + d;
    float4 weight = read4(p.weights + at), mean = read4(p.mean + at), square = read4(p.square + at);
    adam_update(p.adam, sums[i][0], weight.x, mean.x, square.x);
    adam_update(p.adam, sums[i][1], weight.y, mean.y, square.y);
    adam_update(p.adam, sums[i][2], weight.z, mean.z, square.z);
    adam_update(p.adam, sums[i][3], weight.w, mean.w, square.w);
    write4(p.weights + at, weight.x, weight.y, weight.z, weight.w);
    write4(p.mean + at, mean.x, mean.y, mean.z, mean.w);
    write4(p.square + at, square.x, square.y, square.z, square.w);
  }
}

unsigned tiles(int64_t count, int64_t tile) {
  return static_cast<unsigned>(divide_up(count, tile));
}
void check(const HashTrainStep& p) {
  CLO_CHECK(p.heads >= 1 && p.heads <= 65535, p.heads);
  CLO_CHECK(p.width >= 16 && p.width % 16 == 0, p.width);
  CLO_CHECK(p.bits >= 64 && p.bits % 64 == 0, p.bits);
  CLO_CHECK(p.num_keys >= 16 && p.num_keys <= kMostBatchKeys && p.num_keys % 16 == 0, p.num_keys);
}

}  // namespace

void hash_train_encode(const HashTrainStep& p, cudaStream_t stream) {
  check(p);
  const dim3 grid(tiles(p.num_columns(), SquareTile::kRows), tiles(p.bits, SquareTile::kColumns),
                  static_cast<unsigned>(p.heads));
  launch(encode_kernel, grid, dim3(SquareTile::kThreads), 0, stream, p);
}

void hash_train_score(const HashTrainStep& p, cudaStream_t stream) {
  check(p);
  const dim3 grid(tiles(p.num_keys, TallTile::kRows), static_cast<unsigned>(p.heads));
  launch(score_kernel, grid, dim3(TallTile::kThreads), 0, stream, p);
}

void hash_train_pull(const HashTrainStep& p, cudaStream_t stream) {
  check(p);
  const dim3 grid(kBatchQueries / kPullWarps, static_cast<unsigned>(p.heads));
  launch(pull_kernel, grid, dim3(kPullWarps * kWarp), 0, stream, p);
}

void hash_train_back(const HashTrainStep& p, cudaStream_t stream) {
  check(p);
  const dim3 grid(static_cast<unsigned>(p.bits / kWarp), static_cast<unsigned>(p.heads));
  launch(back_kernel, grid, dim3(kBackWarps * kWarp), 0, stream, p);
}

void hash_train_update(const HashTrainStep& p, cudaStream_t stream) {
  check(p);
  const dim3 grid(tiles(p.bits, SquareTile::kRows), tiles(p.width, SquareTile::kColumns),
                  static_cast<unsigned>(p.heads));
  launch(update_kernel, grid, dim3(SquareTile::kThreads), 0, stream, p);
}

void hash_train_step(const HashTrainStep& p, cudaStream_t stream) {
  hash_train_encode(p, stream);
  hash_train_score(p, stream);
  hash_train_pull(p, stream);
  hash_train_back(p, stream);
  hash_train_update(p, stream);
}

}  // namespace clo::kernels
