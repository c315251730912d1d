#pragma once
// The num_select smallest keys of the cluster's tokens, by histograms: which key is the last that
// is taken, and how many at exactly that key. Among equal keys the lower token wins, so blocks in
// order, and inside a block tokens in order, use up what is wanted of the last key.
#include <cstdint>

#include "kernels/refresh/worker.cuh"

namespace clo::kernels {

// What is taken: keys below `key`, and this block's first `ties` tokens at `key`.
struct Threshold {
  uint32_t key = 0;
  uint32_t ties = 0;
};

// Requires: no other block still reads the histogram (a cluster_sync lies behind).
__device__ __forceinline__ void clear_histogram(int num_bins) {
  for (int bin = static_cast<int>(threadIdx.x); bin < num_bins; bin += kRefreshThreads) {
    shared.histogram[bin] = 0;
  }
  __syncthreads();
}

// Sum of one bin over the blocks before `rank`.
__device__ __forceinline__ uint32_t sum_bin(int bin, uint32_t rank) {
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t r = 0; r < kClusterBlocks; ++r) {
    if (r < rank) sum += shared_of(shared.histogram, r)[bin];
  }
  return sum;
}

// Finds the bin in which the wanted-th smallest key lies, and how many of that bin are wanted.
// Collective; begins with a cluster_sync, after which every block's histogram must be complete.
// Requires: 1 <= wanted <= tokens counted.
__device__ __noinline__ void find_threshold(int num_bins, uint32_t wanted) {
  cluster_sync();
  const uint32_t blocks = cluster_size();
  for (int bin = static_cast<int>(threadIdx.x); bin < num_bins; bin += kRefreshThreads) {
    shared.bin_sums[bin] = sum_bin(bin, blocks);
  }
  __syncthreads();
  const int bins_each = (num_bins + kRefreshThreads - 1) / kRefreshThreads;
  const int first = min(static_cast<int>(threadIdx.x) * bins_each, num_bins);
  const int last = min(first + bins_each, num_bins);
  uint32_t mine = 0, total = 0;
  for (int bin = first; bin < last; ++bin) mine += shared.bin_sums[bin];
  const uint32_t before = block_prefix(mine, total);
  if (before < wanted && wanted <= before + mine) {
    uint32_t left = wanted - before;
    int bin = first;
    while (left > shared.bin_sums[bin]) left -= shared.bin_sums[bin++];
    shared.threshold_bin = static_cast<uint32_t>(bin);
    shared.wanted_of_bin = left;
  }
  __syncthreads();
}

// This block's share of what find_threshold wants of its bin.
__device__ __forceinline__ uint32_t ties_here() {
  const uint32_t before = sum_bin(static_cast<int>(shared.threshold_bin), cluster_rank());
  return shared.wanted_of_bin > before ? shared.wanted_of_bin - before : 0;
}

// Threshold of 32-bit keys in scratch, most significant bits first. Every block reads only its own.
__device__ __noinline__ Threshold radix_threshold() {
  const uint32_t* keys = shared.scratch.keys;
  Threshold threshold;
  auto wanted = static_cast<uint32_t>(shared.candidates.num_select);
#pragma unroll 1
  for (int pass = 0; pass < 3; ++pass) {
    if (pass > 0) cluster_sync();  // the last pass's histogram has been read
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;  // 11, 11 and 10 bits
    const int bits = pass == 2 ? 10 : 11;
    const int num_bins = 1 << bits;
    clear_histogram(num_bins);
    for (int32_t token = shared.candidates.begin_here() + static_cast<int32_t>(threadIdx.x);
         token < shared.candidates.end_here(); token += kRefreshThreads) {
      const uint32_t key = __ldcg(keys + token);
      if (pass == 0 || key >> shift >> bits == threshold.key) {
        atomicAdd(&shared.histogram[(key >> shift) & (num_bins - 1)], 1u);
      }
    }
    find_threshold(num_bins, wanted);
    threshold.key = threshold.key << bits | shared.threshold_bin;
    wanted = shared.wanted_of_bin;
  }
  threshold.ties = ties_here();
  return threshold;
}

}  // namespace clo::kernels
