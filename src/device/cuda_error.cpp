#include "device/cuda_error.h"

namespace clo {

CudaError::CudaError(cudaError_t code, const std::string& call)
    : std::runtime_error(call + " failed: " + cudaGetErrorName(code) + ": " +
                         cudaGetErrorString(code)),
      code_(code) {}

void throw_cuda_error(cudaError_t code, const char* call) {
  (void)cudaGetLastError();
  throw CudaError(code, call);
}

}  // namespace clo
