#pragma once
// A cluster of blocks as one worker: its size, its barrier, and shared memory of the other blocks.
// Below sm_90 there are no clusters: there the same code runs with one block. Clusters lie along x,
// and the grid is a whole number of them.
#include <cstdint>

namespace clo::kernels {

__device__ __forceinline__ uint32_t cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}
__device__ __forceinline__ uint32_t cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}
__device__ __forceinline__ uint32_t cluster_index() { return blockIdx.x / cluster_size(); }
__device__ __forceinline__ uint32_t num_clusters() { return gridDim.x / cluster_size(); }

// All threads of all blocks; what they wrote before it, to shared or global memory, the others see
// after it.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();  // `aligned` asks that a warp arrives as one
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

// `word`, a shared variable of this block, as block `rank` has it. Valid while that block lives:
// between its last use and the end of the kernel lies a cluster_sync.
template <typename T>
__device__ __forceinline__ const T* shared_of(const T* word, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(word), "r"(rank));
  return reinterpret_cast<const T*>(address);
#else
  return word;
#endif
}

}  // namespace clo::kernels
