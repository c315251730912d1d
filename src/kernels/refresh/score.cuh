#pragma once
// Hash selection's keys: Hamming distance between the codes of the group's queries and of every
// candidate, summed over the group, and its histogram. The codes cross memory once.
#include <cstdint>

#include "kernels/refresh/instructions.cuh"
#include "kernels/refresh/threshold.cuh"
#include "kernels/refresh/worker.cuh"
#include "kernels/rows/encode.cuh"

namespace clo::kernels {

template <int kElements>
__device__ __forceinline__ void encode_query(const HashParams& hash, const float* query,
                                             uint32_t* code) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = __ldcg(query + e * 32 + lane);
  const uint32_t word = encode_warp(hash, x, lane);
  if (lane < hash.bits / 32) code[lane] = word;
}

// Codes of the group's queries: a warp each. Every block makes its own.
__device__ __noinline__ void encode_queries(const DecodeTables& t) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < group_size(t.shape)) {
    const HashParams& hash =
        t.hashes[static_cast<int64_t>(shared.work.layer) * t.shape.num_kv_heads +
                 shared.work.kv_head];
    const float* query = shared.work.query + warp * t.shape.head_dim;
    auto* code = reinterpret_cast<uint32_t*>(shared.query_codes) + warp * (hash.bits / 32);
    if (t.shape.head_dim == 128) {
      encode_query<4>(hash, query, code);
    } else {
      encode_query<2>(hash, query, code);
    }
  }
  __syncthreads();
}

// Notes distances of the slice's candidates.
struct DistanceNotes {
  uint16_t* distances = shared.scratch.distances();
  int32_t first = shared.candidates.begin_here();
  uint32_t count = static_cast<uint32_t>(max(shared.candidates.end_here() - first, 0));

  __device__ __forceinline__ void put(int32_t token, uint32_t distance) const {
    if (static_cast<uint32_t>(token - first) >= count) return;
    distances[token] = static_cast<uint16_t>(distance);
    atomicAdd(&shared.histogram[distance], 1u);
  }
};

// Addresses of the slice's pages [first_page, first_page + count) for this head.
__device__ __forceinline__ void load_pages(const DecodeTables& t, int32_t first_page,
                                           int32_t count) {
  __syncthreads();  // the last ones have been read
  if (static_cast<int>(threadIdx.x) < count) {
    uint64_t* block =
        t.slots[shared.work.slot].code_blocks[first_page + static_cast<int>(threadIdx.x)];
    shared.page_codes[threadIdx.x] =
        block_codes(t.shape, block, shared.work.layer, shared.work.kv_head);
  }
  __syncthreads();
}

// A turn is two pages: thread i takes token i of both, so that a word of a query's code is read for
// two tokens. Codes come through a ring in shared memory, in which a thread sees only its own
// places, so no barrier is needed; what is under way covers the latency of device memory.
//
// Bits are added up carry-save: of a running word and two new ones the sum bits stay and the carry
// bits are counted, which halves the population counts, the scarcest instruction here.
template <int kWords>
__device__ __noinline__ void score_words(const DecodeTables& t) {
  constexpr int kPieceBytes = kWords == 1 ? 8 : 16;
  constexpr int kPieces = kWords * 8 / kPieceBytes;
  constexpr unsigned kTurns = kRingBytes / (2 * kRefreshThreads * kWords * 8);
  static_assert(kTurns >= 2 && kRefreshThreads == kPageTokens);
  const int tid = static_cast<int>(threadIdx.x), group = group_size(t.shape);
  const auto* queries = reinterpret_cast<const uint32_t*>(shared.query_codes);
  const DistanceNotes notes;
  auto* ring = reinterpret_cast<std::byte*>(shared.ring);
  // Piece p of this thread's token of page j of a turn.
  const auto place = [&](unsigned turn, int j, int p) {
    return ring +
           (turn % kTurns * 2 * kPieces + j * kPieces + p) * (kRefreshThreads * kPieceBytes) +
           tid * kPieceBytes;
  };

  const int32_t last_page = shared.candidates.slice_end / kPageTokens;
  for (int32_t first_page = shared.candidates.slice_begin / kPageTokens; first_page < last_page;
       first_page += kPagesAtOnce) {
    const int32_t num_pages = min(kPagesAtOnce, last_page - first_page);
    load_pages(t, first_page, num_pages);
    const auto num_turns = static_cast<unsigned>(num_pages + 1) / 2;
    const auto start = [&](unsigned turn) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int page = static_cast<int>(2 * turn) + j;
        if (page < num_pages) {
          const auto* code =
              reinterpret_cast<const std::byte*>(shared.page_codes[page] + tid * kWords);
#pragma unroll
          for (int p = 0; p < kPieces; ++p) {
            copy_async<kPieceBytes>(place(turn, j, p), code + p * kPieceBytes);
          }
        }
      }
      close_copies();
    };
    for (unsigned turn = 0; turn < kTurns - 1; ++turn) start(turn);
    for (unsigned turn = 0; turn < num_turns; ++turn) {
      start(turn + kTurns - 1);
      wait_copies<kTurns - 1>();
      uint32_t code[2][2 * kWords], ones[2] = {0, 0}, carries[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          if constexpr (kPieceBytes == 16) {
            const uint4 piece = *reinterpret_cast<const uint4*>(place(turn, j, p));
            code[j][4 * p] = piece.x, code[j][4 * p + 1] = piece.y;
            code[j][4 * p + 2] = piece.z, code[j][4 * p + 3] = piece.w;
          } else {
            const uint2 piece = *reinterpret_cast<const uint2*>(place(turn, j, p));
            code[j][2 * p] = piece.x, code[j][2 * p + 1] = piece.y;
          }
        }
      }
      for (int g = 0; g < group; ++g) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          const uint2 query = *reinterpret_cast<const uint2*>(queries + (g * kWords + w) * 2);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint32_t a = code[j][2 * w] ^ query.x, b = code[j][2 * w + 1] ^ query.y;
            carries[j] += __popc(carry_bits(ones[j], a, b));
            ones[j] = sum_bits(ones[j], a, b);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int page = static_cast<int>(2 * turn) + j;
        if (page < num_pages) {
          notes.put((first_page + page) * kPageTokens + tid, __popc(ones[j]) + 2 * carries[j]);
        }
      }
    }
  }
}

// Codes of any other width.
__device__ __noinline__ void score_any(const DecodeTables& t) {
  const int words = t.shape.code_bits / 64, group = group_size(t.shape);
  const DistanceNotes notes;
  for (int32_t token = shared.candidates.slice_begin + static_cast<int32_t>(threadIdx.x);
       token < shared.candidates.end_here(); token += kRefreshThreads) {
    const uint64_t* code =
        block_codes(t.shape, t.slots[shared.work.slot].code_blocks[token / kPageTokens],
                    shared.work.layer, shared.work.kv_head) +
        token % kPageTokens * words;
    int distance = 0;
    for (int w = 0; w < words; ++w) {
      const uint64_t word = __ldcg(reinterpret_cast<const unsigned long long*>(code + w));
      for (int g = 0; g < group; ++g) {
        distance += __popcll(word ^ shared.query_codes[g * words + w]);
      }
    }
    notes.put(token, static_cast<uint32_t>(distance));
  }
}

__device__ __forceinline__ Threshold hash_threshold(const DecodeTables& t) {
  const int num_bins = group_size(t.shape) * t.shape.code_bits + 1;
  clear_histogram(num_bins);
  encode_queries(t);
  switch (t.shape.code_bits) {
    case 64:
      score_words<1>(t);
      break;
    case 128:
      score_words<2>(t);
      break;
    case 256:
      score_words<4>(t);
      break;
    default:
      score_any(t);
  }
  find_threshold(num_bins, static_cast<uint32_t>(shared.candidates.num_select));
  return {shared.threshold_bin, ties_here()};
}

}  // namespace clo::kernels
