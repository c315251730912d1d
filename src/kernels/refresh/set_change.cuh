#pragma once
// From a chosen set to a changed head cache: which tokens are fresh, which slots are free, the rows
// brought, the map and the bits. The device mirror of kv/head_cache: find_difference and
// commit_difference, find_whole and commit_whole, commit_resident.
//
// Fresh tokens have ranks in token order, free slots in slot order; fill r puts fresh token r into
// free slot r, or past them into a slot that was never used.
#include <cstdint>

#include "kernels/refresh/instructions.cuh"
#include "kernels/refresh/threshold.cuh"
#include "kernels/refresh/worker.cuh"
#include "kernels/rows/stored_rows.cuh"

namespace clo::kernels {

// Of 32 tokens, as bits: those below the threshold, and those at it.
struct WordClasses {
  uint32_t below = 0, equal = 0;
};
__device__ __forceinline__ void classify(uint32_t key, uint32_t threshold, int bit,
                                         WordClasses& classes) {
  classes.below |= static_cast<uint32_t>(key < threshold) << bit;
  classes.equal |= static_cast<uint32_t>(key == threshold) << bit;
}
__device__ __forceinline__ WordClasses classify_distances(const uint16_t* distances,
                                                          uint32_t threshold) {
  WordClasses classes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(distances) + i);
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      classify(pairs[k] & 0xFFFFu, threshold, 8 * i + 2 * k, classes);
      classify(pairs[k] >> 16, threshold, 8 * i + 2 * k + 1, classes);
    }
  }
  return classes;
}
__device__ __forceinline__ WordClasses classify_words(const uint32_t* keys, uint32_t threshold) {
  WordClasses classes;
#pragma unroll 4
  for (int i = 0; i < 8; ++i) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(keys) + i);
    classify(v.x, threshold, 4 * i, classes);
    classify(v.y, threshold, 4 * i + 1, classes);
    classify(v.z, threshold, 4 * i + 2, classes);
    classify(v.w, threshold, 4 * i + 3, classes);
  }
  return classes;
}

// The lowest `count` bits that are set in `bits`.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t bits, uint32_t count) {
  if (count >= static_cast<uint32_t>(__popc(bits))) return bits;
  uint32_t kept = 0;
  for (; count > 0; --count) {
    const uint32_t lowest = bits & (0u - bits);
    kept |= lowest;
    bits ^= lowest;
  }
  return kept;
}

enum class KeyForm : uint8_t { kNone, kDistances, kWords };  // kNone: every candidate is taken

// Marks this slice's part of the set: bits in `held` (evictable heads), fresh tokens in the scratch
// list from the slice's first token on; leaves the number of fresh tokens in shared.num_fresh.
// Nothing reads `held` in between, so that it holds the new set from here on.
__device__ __noinline__ void mark_set(KeyForm keys, Threshold threshold) {
  uint32_t* held = shared.head.held;
  int32_t* fresh = shared.scratch.fresh + shared.candidates.slice_begin;
  uint32_t num_ties = 0, num_fresh = 0;
  for (int32_t base = shared.candidates.slice_begin; base < shared.candidates.slice_end;
       base += 32 * kRefreshThreads) {
    const int32_t token = base + 32 * static_cast<int32_t>(threadIdx.x);
    const bool inside = token < shared.candidates.slice_end;
    const uint32_t mask = inside ? shared.candidates.mask(token) : 0;
    uint32_t chosen = mask, total = 0;
    if (keys != KeyForm::kNone) {  // the same in every thread
      WordClasses classes;
      if (mask != 0) {
        classes = keys == KeyForm::kDistances
                      ? classify_distances(shared.scratch.distances() + token, threshold.key)
                      : classify_words(shared.scratch.keys + token, threshold.key);
      }
      const uint32_t ties = classes.equal & mask;
      const uint32_t before = num_ties + block_prefix(__popc(ties), total);
      num_ties += total;
      const uint32_t wanted = threshold.ties > before ? threshold.ties - before : 0;
      chosen = (classes.below & mask) | lowest_bits(ties, wanted);
    }
    uint32_t news = chosen;
    if (held != nullptr && inside && token < shared.head.held_tokens) {
      if (shared.head.form == SetForm::kDifference) news &= ~__ldcg(held + token / 32);
      held[token / 32] = chosen;
    }
    uint32_t at = num_fresh + block_prefix(__popc(news), total);
    num_fresh += total;
    for (; news != 0; news &= news - 1) fresh[at++] = token + __ffs(static_cast<int>(news)) - 1;
  }
  if (threadIdx.x == 0) shared.num_fresh = num_fresh;
}

inline constexpr int kSlotsEach = 8;  // consecutive slots of a thread: lookups under way at once

// Slots of a block's share. A multiple of kSlotsEach, so that shares begin on 16-byte boundaries.
__device__ __forceinline__ int32_t slot_share(int32_t num_slots_used) {
  const int32_t unit = static_cast<int32_t>(cluster_size()) * kSlotsEach;
  return (num_slots_used + unit - 1) / unit * kSlotsEach;
}

// Lists the free slots of this block's share of [0, num_slots_used): holes, and slots whose token
// is not in the set. Requires: every block has marked its part (cluster_sync).
__device__ __noinline__ void find_free_slots() {
  const int32_t num_slots_used = shared.head.num_slots_used;
  const int32_t share = slot_share(num_slots_used);
  const int32_t begin = static_cast<int32_t>(cluster_rank()) * share;
  const int32_t end = min(begin + share, num_slots_used);
  const uint32_t* held = shared.head.held;
  int32_t* free_slots = shared.scratch.free_slots + begin;
  uint32_t num_free = 0;
  for (int32_t base = begin; base < end; base += kSlotsEach * kRefreshThreads) {
    const int32_t slot = base + kSlotsEach * static_cast<int32_t>(threadIdx.x);
    int32_t token[kSlotsEach];
    if (slot + kSlotsEach <= end) {
#pragma unroll
      for (int i = 0; i < kSlotsEach; i += 4) {
        const int4 v = __ldcg(reinterpret_cast<const int4*>(shared.head.slot_token + slot + i));
        token[i] = v.x, token[i + 1] = v.y, token[i + 2] = v.z, token[i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSlotsEach; ++i) {
        token[i] = slot + i < end ? __ldcg(shared.head.slot_token + slot + i) : -1;
      }
    }
    uint32_t is_free = 0;
#pragma unroll
    for (int i = 0; i < kSlotsEach; ++i) {
      const uint32_t word = token[i] < 0 ? 0 : __ldcg(held + token[i] / 32);
      const bool kept = token[i] >= 0 && (word >> (token[i] % 32) & 1u) != 0;
      is_free |= static_cast<uint32_t>(slot + i < end && !kept) << i;
    }
    uint32_t total = 0;
    uint32_t at = num_free + block_prefix(__popc(is_free), total);
    num_free += total;
    for (; is_free != 0; is_free &= is_free - 1) {
      free_slots[at++] = slot + __ffs(static_cast<int>(is_free)) - 1;
    }
  }
  if (threadIdx.x == 0) shared.num_free = num_free;
}

// Ranks at which the blocks' fresh tokens and free slots begin. Requires: a cluster_sync since the
// counts were written.
__device__ __noinline__ void share_counts() {
  if (threadIdx.x < 32) {
    const uint32_t lane = threadIdx.x, blocks = cluster_size();
    uint32_t fresh = lane < blocks ? *shared_of(&shared.num_fresh, lane) : 0;
    uint32_t free = lane < blocks ? *shared_of(&shared.num_free, lane) : 0;
#pragma unroll
    for (uint32_t offset = 1; offset < kClusterBlocks; offset *= 2) {
      const uint32_t other_fresh = __shfl_up_sync(0xFFFFFFFFu, fresh, offset);
      const uint32_t other_free = __shfl_up_sync(0xFFFFFFFFu, free, offset);
      if (lane >= offset) fresh += other_fresh, free += other_free;
    }
    if (lane == 0) shared.fresh_begin[0] = shared.free_begin[0] = 0;
    if (lane < blocks) {
      shared.fresh_begin[lane + 1] = fresh;
      shared.free_begin[lane + 1] = free;
    }
  }
  __syncthreads();
}

// Which block's list holds rank `rank`.
__device__ __forceinline__ uint32_t block_of(const uint32_t* begin, uint32_t rank) {
  uint32_t block = 0;
  while (block + 1 < cluster_size() && rank >= begin[block + 1]) ++block;
  return block;
}
__device__ __forceinline__ int32_t fresh_token(uint32_t rank) {
  const uint32_t block = block_of(shared.fresh_begin, rank);
  const int64_t at = static_cast<int64_t>(block) * shared.candidates.slice_tokens + rank -
                     shared.fresh_begin[block];
  return __ldcg(shared.scratch.fresh + at);
}
__device__ __forceinline__ int32_t free_slot(int32_t num_slots_used, uint32_t rank) {
  const uint32_t block = block_of(shared.free_begin, rank);
  const int64_t at =
      static_cast<int64_t>(block) * slot_share(num_slots_used) + rank - shared.free_begin[block];
  return __ldcg(shared.scratch.free_slots + at);
}

// Where the row of fill `rank` comes from and goes to; notes it in the map.
__device__ __forceinline__ RowMove place_row(const DecodeTables& t, uint32_t rank) {
  const int32_t num_slots_used = shared.head.num_slots_used;
  const uint32_t num_free = shared.free_begin[cluster_size()];
  const int32_t token = fresh_token(rank);
  int32_t slot = static_cast<int32_t>(rank);
  if (shared.head.form == SetForm::kDifference) {
    slot = rank < num_free ? free_slot(num_slots_used, rank)
                           : num_slots_used + static_cast<int32_t>(rank - num_free);
  }
  shared.head.slot_token[slot] = token;
  return {source_row(t, token), shared.head.slots + slot * stored_row_bytes(t.shape)};
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Brings the fresh rows into their slots and writes the map. A warp takes up to 32 rows in turn, a
// lane finds source and slot of one; the rows pass through the warp's part of shared memory by bulk
// copies, which a lane starts for its own row. All blocks walk the same head in token order: rows
// far apart cost address translations. A row that begins inside a line of 128 bytes is brought with
// the whole lines it lies in: the link answers requests for parts of lines half as fast.
__device__ __noinline__ void fetch_rows(const DecodeTables& t) {
  constexpr int kWarpBytes = kRingBytes / kRefreshWarps;
  const auto blocks = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
  const auto num_fresh = static_cast<int>(shared.fresh_begin[blocks]);
  const int lane = static_cast<int>(threadIdx.x) % 32, own = static_cast<int>(threadIdx.x) / 32;
  const auto num_bytes = static_cast<uint32_t>(stored_row_bytes(t.shape));
  // Rows begin at multiples of their size, so at most `most_ahead` bytes behind a line's beginning;
  // a page's last row ends where a line does, so that whole lines never reach past a page.
  const uint32_t most_ahead = 128 - min(num_bytes & (~num_bytes + 1), 128u);
  const uint32_t load_bytes =
      most_ahead == 0 ? num_bytes : (num_bytes + most_ahead + 127) / 128 * 128;
  const int at_once = kWarpBytes / static_cast<int>(load_bytes);
  std::byte* buffer = reinterpret_cast<std::byte*>(shared.ring) + own * kWarpBytes;
  uint64_t* arrived = &shared.rows_arrived[own];
  if (lane == 0) init_barrier(arrived);
  fence_copy_engine();  // the ring was written and read by ordinary instructions
  __syncwarp();

  // Few rows are dealt out thinly, so that every warp has copies under way; warps of different
  // blocks side by side, so that a small job is spread over multiprocessors.
  const int fetch_warps = shared.work.fetch_warps, num_warps = blocks * fetch_warps;
  const int turn_rows = min(32, (num_fresh + num_warps - 1) / num_warps);
  const int last = own < fetch_warps ? num_fresh : 0;
  uint32_t phase = 0;
  for (int base = (own * blocks + rank) * turn_rows; base < last; base += num_warps * turn_rows) {
    const int rows = min(turn_rows, num_fresh - base);
    RowMove move = {};
    if (lane < rows) move = place_row(t, static_cast<uint32_t>(base + lane));
    const auto ahead = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(move.source)) & most_ahead;
    for (int first = 0; first < rows; first += at_once) {
      const int here = min(at_once, rows - first);
      const bool mine = lane >= first && lane < first + here;
      std::byte* place = buffer + (lane - first) * static_cast<int>(load_bytes);
      wait_stores_read();
      __syncwarp();  // every lane's part of the buffer is free
      if (lane == 0) expect_bytes(arrived, static_cast<uint32_t>(here) * load_bytes);
      __syncwarp();
      if (mine) bulk_load(place, move.source - ahead, load_bytes, arrived);
      wait_barrier(arrived, phase);
      phase ^= 1;
      if (mine) bulk_store(move.target, place + ahead, num_bytes);
    }
  }
  wait_stores_written();
  fence_copy_engine();
  __syncwarp();
  if (lane == 0) end_barrier(arrived);
}

#else

inline constexpr int kLoadsAtOnce = 8;  // 16-byte loads of a lane under way

// Copies up to 32 rows by one warp: kLanesEach lanes share a row, 16 bytes each, of num_bytes.
template <int kLanesEach>
__device__ __forceinline__ void copy_rows(const RowMove* moves, int num_rows, int num_bytes) {
  constexpr int kRowsEach = 32 / kLanesEach;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int offset = lane % kLanesEach * 16;
  if (offset >= num_bytes) return;
#pragma unroll 1
  for (int row = lane / kLanesEach; row < num_rows; row += kLoadsAtOnce * kRowsEach) {
    // Given a value, or the compiler keeps what is not loaded from one turn to the next.
    uint4 data[kLoadsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      if (row + i * kRowsEach < num_rows) {
        data[i] = load_once(moves[row + i * kRowsEach].source + offset);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      if (row + i * kRowsEach < num_rows) {
        *reinterpret_cast<uint4*>(moves[row + i * kRowsEach].target + offset) = data[i];
      }
    }
  }
}

// The same without bulk copies: all lanes copy whole rows, several at once.
template <int kLanesEach>
__device__ __noinline__ void fetch_rows_of(const DecodeTables& t) {
  constexpr int kRowsEach = 32 / kLanesEach;
  const auto blocks = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
  const auto num_fresh = static_cast<int>(shared.fresh_begin[blocks]);
  const int lane = static_cast<int>(threadIdx.x) % 32, num_warps = blocks * kRefreshWarps;
  RowMove* moves = shared.moves[threadIdx.x / 32];
  // Few rows are dealt out thinly, so that every warp has loads under way.
  const int per_warp = (num_fresh + num_warps - 1) / num_warps;
  const int turn_rows = min(32, (per_warp + kRowsEach - 1) / kRowsEach * kRowsEach);
  // Warps of different blocks side by side: a small job is then spread over multiprocessors.
  const int warp = static_cast<int>(threadIdx.x) / 32 * blocks + rank;
  for (int base = warp * turn_rows; base < num_fresh; base += num_warps * turn_rows) {
    const int rows = min(turn_rows, num_fresh - base);
    if (lane < rows) moves[lane] = place_row(t, static_cast<uint32_t>(base + lane));
    __syncwarp();
    copy_rows<kLanesEach>(moves, rows, static_cast<int>(stored_row_bytes(t.shape)));
    __syncwarp();
  }
}
__device__ __forceinline__ void fetch_rows(const DecodeTables& t) {
  if (stored_row_bytes(t.shape) > 256) {
    fetch_rows_of<32>(t);
  } else {
    fetch_rows_of<16>(t);
  }
}

#endif

// Priming where stored rows are compressed: the layer buffer has full rows.
template <typename Element, int kHeadDim>
__device__ __noinline__ void compress_fresh_rows_of(const DecodeTables& t) {
  constexpr int kRowLanes = kHeadDim / 4, kRowsAtOnce = 32 / kRowLanes;
  const auto blocks = static_cast<int>(cluster_size()), rank = static_cast<int>(cluster_rank());
  const auto num_fresh = static_cast<int>(shared.fresh_begin[blocks]);
  const int lane = static_cast<int>(threadIdx.x) % 32, num_warps = blocks * kRefreshWarps;
  RowMove* moves = shared.moves[threadIdx.x / 32];
  const int warp = static_cast<int>(threadIdx.x) / 32 * blocks + rank;
  for (int base = warp * 32; base < num_fresh; base += num_warps * 32) {
    const int rows = min(32, num_fresh - base);
    if (lane < rows) moves[lane] = place_row(t, static_cast<uint32_t>(base + lane));
    __syncwarp();
    for (int first = 0; first < rows; first += kRowsAtOnce) {
      const int row = first + lane / kRowLanes, of_row = lane % kRowLanes;
      const bool there = row < rows;
      uint4 full = {};
      if (there) full = load_once(moves[row].source + of_row * 16);
      store_piece<kHeadDim / 8>(there ? moves[row].target : nullptr, t.shape.stored,
                                compress_piece<Element, kHeadDim / 8>(t.shape.stored, full),
                                of_row);
    }
    __syncwarp();
  }
}
__device__ __forceinline__ void compress_fresh_rows(const DecodeTables& t) {
  const bool wide = t.shape.head_dim == 128;
  if (t.shape.type == DType::kBF16) {
    wide ? compress_fresh_rows_of<Bf16, 128>(t) : compress_fresh_rows_of<Bf16, 64>(t);
  } else {
    wide ? compress_fresh_rows_of<F16, 128>(t) : compress_fresh_rows_of<F16, 64>(t);
  }
}

// Marks slots that fall empty.
__device__ __noinline__ void empty_slots() {
  const uint32_t blocks = cluster_size();
  const uint32_t num_fresh = shared.fresh_begin[blocks], num_free = shared.free_begin[blocks];
  const auto num_slots_used = static_cast<uint32_t>(shared.head.num_slots_used);
  const uint32_t first = num_fresh + cluster_rank() * kRefreshThreads + threadIdx.x;
  const bool whole = shared.head.form == SetForm::kWhole;
  for (uint32_t left = first; left < (whole ? num_slots_used : num_free);
       left += blocks * kRefreshThreads) {
    const auto slot = static_cast<int32_t>(left);
    shared.head.slot_token[whole ? slot : free_slot(shared.head.num_slots_used, left)] = -1;
  }
}

// A resident head's list: this block's tokens at their rank.
__device__ __forceinline__ void write_list() {
  int32_t* list = shared.head.slot_token + shared.fresh_begin[cluster_rank()];
  const int32_t* fresh = shared.scratch.fresh + shared.candidates.slice_begin;
  for (uint32_t i = threadIdx.x; i < shared.num_fresh; i += kRefreshThreads) {
    list[i] = __ldcg(fresh + i);
  }
}

}  // namespace clo::kernels
