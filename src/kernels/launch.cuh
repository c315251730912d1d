#pragma once
// Launching kernels that overlap their start with the end of the one before (programmatic dependent
// launch), and the waits that keep this right. Device code and .cu files only.
//
// Every kernel of a step calls wait_for_predecessor() in every thread before it touches memory that
// an earlier kernel writes or reads, and before it returns. Then "the predecessor has finished"
// includes all kernels before it. What is constant (weights) may be read earlier; attention also
// reads rows and sets early and finds out afterwards whether they have changed (attend.cu).
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "device/cuda_error.h"

namespace clo::kernels {

__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel's blocks may start; they wait in wait_for_predecessor().
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the current device can start a kernel before the one ahead has ended.
inline bool early_launch_supported() {
  static const bool supported = [] {
    int device = 0, major = 0;
    CLO_CUDA(cudaGetDevice(&device));
    CLO_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
  }();
  return supported;
}

// Launches `kernel` after what is already in `stream`, allowed to start early where the device can
// (sm_90 and newer); elsewhere the launch is a plain one.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early_launch_supported() ? 1 : 0;
  // A multiprocessor changes its split between L1 and shared memory only when it is idle: one
  // kernel with another preference would keep the next from starting beside it.
  CLO_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared));
  CLO_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...));
}

// Acquire and release on words that kernels running at the same time share (device scope).
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// To the host: system scope.
__device__ __forceinline__ void store_release_system(volatile uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned long long global_timer_ns() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// A wait that has not ended after this long is a fault, not slowness: the whole cache of a head
// crosses the link in less.
inline constexpr unsigned long long kWatchdogNs = 10ull * 1000 * 1000 * 1000;

}  // namespace clo::kernels
