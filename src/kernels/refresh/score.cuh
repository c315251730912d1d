#pragma once
// Hash selection's keys: distances between what the group's queries ask and the code of every
// candidate, and their histogram. The codes cross memory once.
//
// The group asks at once, with a code and a weight for each of its bits; a key's distance is a
// constant plus the weights of the bits in which it differs. Weights are at most 7: three planes
// of bits.
// - Graded (SelectRule::kGradedHash): code and weights are sign and size of the projection of the
//   queries' sum (ops/graded_query.h).
// - Hamming distances of the queries' codes, summed over the group (kHash): of n queries let c have
//   bit i of their code set. A key with that bit adds n - c to its distance, one without adds c. So
//   bit i adds min(c, n - c), whatever the key, and |n - 2 c| more when the key's bit is not that
//   of the majority. Equal to the sum of the distances, bit for bit.
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
  const uint32_t word = encode_warp(hash, x, false, lane);
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

// Bits [32 w, 32 w + 32) of the group's code and weights, by a warp whose lanes have one each.
__device__ __forceinline__ void note_word(int word, bool sign, int weight, int lane) {
  const uint32_t code = __ballot_sync(0xFFFFFFFFu, sign);
  uint32_t plane[kWeightPlanes];
#pragma unroll
  for (int p = 0; p < kWeightPlanes; ++p) {
    plane[p] = __ballot_sync(0xFFFFFFFFu, (weight >> p & 1) != 0);
  }
  if (lane == 0) {
    shared.majority[word] = code;
#pragma unroll
    for (int p = 0; p < kWeightPlanes; ++p) shared.planes[p][word] = plane[p];
  }
}

// The group's codes as one: the majority's code, and the weights of its bits in planes, divided by
// two for an even group (they all are even then). Every block makes its own.
// Requires: the queries' codes; at most kRefreshThreads bits.
__device__ __forceinline__ void combine_queries(const DecodeTables& t) {
  const int bits = t.shape.code_bits, group = group_size(t.shape);
  const int bit = static_cast<int>(threadIdx.x), lane = bit % 32, words = bits / 32;
  if (bit < bits) {  // whole warps
    const auto* codes = reinterpret_cast<const uint32_t*>(shared.query_codes);
    int count = 0;
    for (int g = 0; g < group; ++g) count += codes[g * words + bit / 32] >> lane & 1u;
    const bool majority = 2 * count > group;
    const int weight = abs(group - 2 * count) >> (group % 2 == 0 ? 1 : 0);
    int base = min(count, group - count);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      base += __shfl_xor_sync(0xFFFFFFFFu, base, offset);
    }
    note_word(bit / 32, majority, weight, lane);
    if (lane == 0) shared.base_of_word[bit / 32] = base;
  }
  __syncthreads();
}

template <int kElements>
__device__ __forceinline__ void project_queries(const HashParams& hash, const float* queries,
                                                int group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float x[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    x[e] = __ldcg(queries + e * 32 + lane);
    for (int g = 1; g < group; ++g) x[e] += __ldcg(queries + g * kElements * 32 + e * 32 + lane);
  }
  project_warp(hash, x, false, lane,
               [&](int word, float value) { shared.projection[word * 32 + lane] = value; });
}

// What the queries ask together, as grade_query() on the CPU. Every block makes its own.
__device__ __noinline__ void grade_queries(const DecodeTables& t) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int bits = t.shape.code_bits;
  if (warp == 0) {
    const HashParams& hash =
        t.hashes[static_cast<int64_t>(shared.work.layer) * t.shape.num_kv_heads +
                 shared.work.kv_head];
    if (t.shape.head_dim == 128) {
      project_queries<4>(hash, shared.work.query, group_size(t.shape));
    } else {
      project_queries<2>(hash, shared.work.query, group_size(t.shape));
    }
  }
  __syncthreads();
  // Sizes are in the order of their bits. What is not a number counts as 0.
  uint32_t largest = 0;
  for (int bit = thread; bit < bits; bit += kRefreshThreads) {
    const float size = fabsf(shared.projection[bit]);
    if (size >= 0) largest = max(largest, __float_as_uint(size));
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (lane == 0) shared.warp_sums[warp] = largest;
  __syncthreads();
  for (int w = 0; w < kRefreshWarps; ++w) largest = max(largest, shared.warp_sums[w]);
  const int most = most_bit_weight(bits);
  const float steps = weight_steps(most, __uint_as_float(largest));
  for (int bit = thread; bit < bits; bit += kRefreshThreads) {  // whole warps
    const float value = shared.projection[bit];
    note_word(bit / 32, value > 0, bit_weight(fabsf(value), steps, most), lane);
    if (lane == 0) shared.base_of_word[bit / 32] = 0;
  }
  __syncthreads();
}

// Sum over columns of bits: word i of plane p counts 2^p for each of its bits, a carried word
// 2^kPlane. Three words of one weight become a sum and a carry of the next, until one is left,
// whose population is counted: that is the scarcest instruction here.
template <int kPlane, int kPlanes, int kWords, int kCarried>
__device__ __forceinline__ uint32_t weighted_count(const uint32_t (&planes)[kPlanes][kWords],
                                                   const uint32_t* carried) {
  constexpr int kOwn = kPlane < kPlanes ? kWords : 0, kCount = kOwn + kCarried;
  if constexpr (kCount == 0) {
    return 0;
  } else {
    uint32_t word[kCount], carry[kCount / 2 + 1];
#pragma unroll
    for (int i = 0; i < kCarried; ++i) word[i] = carried[i];
    if constexpr (kOwn > 0) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) word[kCarried + i] = planes[kPlane][i];
    }
    uint32_t sum = word[0];
#pragma unroll
    for (int i = 1; i < kCount; i += 2) {
      const uint32_t other = i + 1 < kCount ? word[i + 1] : 0;
      carry[i / 2] = carry_bits(sum, word[i], other);
      sum = sum_bits(sum, word[i], other);
    }
    return __popc(sum) + 2 * weighted_count<kPlane + 1, kPlanes, kWords, kCount / 2>(planes, carry);
  }
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

// A turn is two pages: thread i takes token i of both. Codes come through a ring in shared memory,
// in which a thread sees only its own places, so no barrier is needed; what is under way covers the
// latency of device memory.
template <int kWords, int kPlanes>
__device__ __noinline__ void score_words(const DecodeTables& t, int doubled) {
  constexpr int kHalves = 2 * kWords;  // words of 32 bits
  constexpr int kPieceBytes = kWords == 1 ? 8 : 16;
  constexpr int kPieces = kWords * 8 / kPieceBytes;
  constexpr unsigned kTurns = kRingBytes / (2 * kRefreshThreads * kWords * 8);
  static_assert(kTurns >= 2 && kRefreshThreads == kPageTokens);
  const int tid = static_cast<int>(threadIdx.x);
  const DistanceNotes notes;
  auto* ring = reinterpret_cast<std::byte*>(shared.ring);
  // Piece p of this thread's token of page j of a turn.
  const auto place = [&](unsigned turn, int j, int p) {
    return ring +
           (turn % kTurns * 2 * kPieces + j * kPieces + p) * (kRefreshThreads * kPieceBytes) +
           tid * kPieceBytes;
  };
  uint32_t majority[kHalves], weights[kPlanes][kHalves], base = 0;
#pragma unroll
  for (int w = 0; w < kHalves; ++w) {
    majority[w] = shared.majority[w];
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) weights[p][w] = shared.planes[p][w];
    base += static_cast<uint32_t>(shared.base_of_word[w]);
  }
  const uint32_t nap_ns = shared.work.score_nap_ns;

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
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t code[kHalves], differs[kPlanes][kHalves];
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          if constexpr (kPieceBytes == 16) {
            const uint4 piece = *reinterpret_cast<const uint4*>(place(turn, j, p));
            code[4 * p] = piece.x, code[4 * p + 1] = piece.y;
            code[4 * p + 2] = piece.z, code[4 * p + 3] = piece.w;
          } else {
            const uint2 piece = *reinterpret_cast<const uint2*>(place(turn, j, p));
            code[0] = piece.x, code[1] = piece.y;
          }
        }
#pragma unroll
        for (int w = 0; w < kHalves; ++w) {
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) differs[p][w] = (code[w] ^ majority[w]) & weights[p][w];
        }
        const uint32_t more = weighted_count<0, kPlanes, kHalves, 0>(differs, nullptr);
        const int page = static_cast<int>(2 * turn) + j;
        if (page < num_pages) {
          notes.put((first_page + page) * kPageTokens + tid, base + (more << doubled));
        }
      }
      if (nap_ns > 0) __nanosleep(nap_ns);
    }
  }
}

template <int kWords>
__device__ __forceinline__ void score_group(const DecodeTables& t, bool graded) {
  if (graded) {
    score_words<kWords, kWeightPlanes>(t, 0);
    return;
  }
  combine_queries(t);
  // The largest weight: of an odd group its size, of an even one half of it.
  const int group = group_size(t.shape), doubled = group % 2 == 0 ? 1 : 0;
  const int largest = group >> doubled;
  if (largest == 1) {
    score_words<kWords, 1>(t, doubled);
  } else if (largest <= 3) {
    score_words<kWords, 2>(t, doubled);
  } else {
    score_words<kWords, 3>(t, doubled);
  }
}

// Codes of any other width.
__device__ __noinline__ void score_any(const DecodeTables& t, bool graded) {
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
      if (graded) {
        for (int half = 0; half < 2; ++half) {
          const int at = 2 * w + half;
          const uint32_t differs = static_cast<uint32_t>(word >> (32 * half)) ^ shared.majority[at];
          for (int p = 0; p < kWeightPlanes; ++p) {
            distance += __popc(differs & shared.planes[p][at]) << p;
          }
        }
        continue;
      }
      for (int g = 0; g < group; ++g) {
        distance += __popcll(word ^ shared.query_codes[g * words + w]);
      }
    }
    notes.put(token, static_cast<uint32_t>(distance));
  }
}

__device__ __forceinline__ Threshold hash_threshold(const DecodeTables& t, bool graded) {
  const int bits = t.shape.code_bits;
  const int num_bins = (graded ? most_bit_weight(bits) : group_size(t.shape)) * bits + 1;
  clear_histogram(num_bins);
  if (graded) {
    grade_queries(t);
  } else {
    encode_queries(t);
  }
  switch (bits) {
    case 64:
      score_group<1>(t, graded);
      break;
    case 128:
      score_group<2>(t, graded);
      break;
    case 256:
      score_group<4>(t, graded);
      break;
    default:
      score_any(t, graded);
  }
  find_threshold(num_bins, static_cast<uint32_t>(shared.candidates.num_select));
  return {shared.threshold_bin, ties_here()};
}

}  // namespace clo::kernels
