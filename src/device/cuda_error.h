#pragma once
// One place where CUDA calls are checked. A failed call throws CudaError with the call's text; the
// engine loop and main() catch it. Nothing is left behind for the next call to trip over: the
// runtime's last error is cleared.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace clo {

class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t code, const std::string& call);
  cudaError_t code() const { return code_; }

 private:
  cudaError_t code_;
};

void throw_cuda_error(cudaError_t code, const char* call);

inline void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw_cuda_error(code, call);
}

}  // namespace clo

#define CLO_CUDA(call) ::clo::check_cuda((call), #call)
