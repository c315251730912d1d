#pragma once
// A block's tile of an f32 product: out[r, c] = sum over k of a[r, k] b[c, k], accumulated in
// registers, k ascending, so that a sum does not depend on the launch. Operands are read through
// accessors of four values, which give zero outside.
#include <cuda_runtime.h>

#include <cstdint>

namespace clo::kernels {

inline constexpr int kTileDepth = 16;

// Tile sizes; a thread has 8 rows and 4 columns of it.
template <int kRowsOfTile, int kColumnsOfTile>
struct ProductTile {
  static constexpr int kRows = kRowsOfTile, kColumns = kColumnsOfTile;
  static constexpr int kThreads = (kRows / 8) * (kColumns / 4);
  // A little longer than a tile: writes of turned operands then meet different banks.
  static constexpr int kRowPitch = kRows + 4, kColumnPitch = kColumns + 4;

  struct Shared {
    alignas(16) float a[2][kTileDepth][kRowPitch];
    alignas(16) float b[2][kTileDepth][kColumnPitch];
  };
};

// Four values of an operand on their way to shared memory.
// kAlongDepth: [row][depth] in memory, four depths are read at once; else [depth][row], four rows.
template <int kCount, int kThreads, bool kAlongDepth>
struct OperandPiece {
  static constexpr int kQuads = kCount * kTileDepth / 4;
  static constexpr int kEach = (kQuads + kThreads - 1) / kThreads;
  float4 values[kEach];

  // read(row, depth) within the matrix, `row` from the tile's first.
  template <typename Read>
  __device__ __forceinline__ void load(int depth, const Read& read) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int quad = static_cast<int>(threadIdx.x) + i * kThreads;
      if (kQuads % kThreads != 0 && quad >= kQuads) break;
      if constexpr (kAlongDepth) {
        values[i] = read(quad / (kTileDepth / 4), depth + 4 * (quad % (kTileDepth / 4)));
      } else {
        values[i] = read(4 * (quad % (kCount / 4)), depth + quad / (kCount / 4));
      }
    }
  }
  template <int kPitch>
  __device__ __forceinline__ void store(float (&tile)[kTileDepth][kPitch]) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int quad = static_cast<int>(threadIdx.x) + i * kThreads;
      if (kQuads % kThreads != 0 && quad >= kQuads) break;
      if constexpr (kAlongDepth) {
        const int row = quad / (kTileDepth / 4), depth = 4 * (quad % (kTileDepth / 4));
        tile[depth][row] = values[i].x;
        tile[depth + 1][row] = values[i].y;
        tile[depth + 2][row] = values[i].z;
        tile[depth + 3][row] = values[i].w;
      } else {
        *reinterpret_cast<float4*>(&tile[quad / (kCount / 4)][4 * (quad % (kCount / 4))]) =
            values[i];
      }
    }
  }
};

// sums[i][j]: row 8 (thread / (kColumns / 4)) + i, column 4 (thread % (kColumns / 4)) + j of the
// tile. Every thread of a block of Tile::kThreads calls it.
template <typename Tile, bool kAlongDepth, typename ReadA, typename ReadB>
__device__ __forceinline__ void tile_product(typename Tile::Shared& shared, int depth,
                                             const ReadA& read_a, const ReadB& read_b,
                                             float (&sums)[8][4]) {
  const int row = 8 * (static_cast<int>(threadIdx.x) / (Tile::kColumns / 4));
  const int column = 4 * (static_cast<int>(threadIdx.x) % (Tile::kColumns / 4));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i][j] = 0;
  }
  OperandPiece<Tile::kRows, Tile::kThreads, kAlongDepth> a;
  OperandPiece<Tile::kColumns, Tile::kThreads, kAlongDepth> b;
  a.load(0, read_a);
  b.load(0, read_b);
  a.store(shared.a[0]);
  b.store(shared.b[0]);
  __syncthreads();
  int half = 0;
  for (int first = 0; first < depth; first += kTileDepth) {
    const bool more = first + kTileDepth < depth;
    if (more) {
      a.load(first + kTileDepth, read_a);
      b.load(first + kTileDepth, read_b);
    }
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      const float4 low = *reinterpret_cast<const float4*>(&shared.a[half][k][row]);
      const float4 high = *reinterpret_cast<const float4*>(&shared.a[half][k][row + 4]);
      const float4 right = *reinterpret_cast<const float4*>(&shared.b[half][k][column]);
      const float left[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sums[i][0] += left[i] * right.x;
        sums[i][1] += left[i] * right.y;
        sums[i][2] += left[i] * right.z;
        sums[i][3] += left[i] * right.w;
      }
    }
    // The other half was last read before the barrier of the round before.
    if (more) {
      a.store(shared.a[half ^ 1]);
      b.store(shared.b[half ^ 1]);
      __syncthreads();
      half ^= 1;
    }
  }
}

}  // namespace clo::kernels
