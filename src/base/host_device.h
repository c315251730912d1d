#pragma once
// Functions that host and device code share: plain inline ones where no CUDA compiler reads them.

#if defined(__CUDACC__)
#define CLO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CLO_HOST_DEVICE inline
#endif
