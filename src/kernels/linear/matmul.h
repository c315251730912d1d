#pragma once
// Products of many rows (prefill, large decode batches): cublasLt with f32 sums. Owns the library
// handle and remembers the algorithm of every shape; workspace is the caller's. One thread, one
// stream at a time, since all products share the workspace.
//
// An algorithm is looked up on the first use of a shape; call prepare() for shapes that will first
// be met while a stream is captured.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tensor/dtype.h"

namespace clo::kernels {

// Enough for every algorithm that the library offers on Hopper (its own recommendation).
inline constexpr int64_t kMatmulWorkspaceBytes = int64_t{32} << 20;

struct MatmulShape {
  int64_t rows = 0;
  int64_t num_outputs = 0;
  int64_t num_inputs = 0;
  DType out_type = DType::kBF16;  // `type` or f32
  bool bias = false;
  bool accumulate = false;    // out += ...; only with f32
  DType type = DType::kBF16;  // of x and weight: bf16 or f16

  bool operator==(const MatmulShape&) const = default;
};

class Matmul {
 public:
  // workspace: device memory, 256-byte aligned. Fails: std::runtime_error with the call's text.
  Matmul(void* workspace, int64_t workspace_bytes);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Fails: std::runtime_error where the library has no algorithm for the shape.
  void prepare(const MatmulShape& shape);

  // out[rows, num_outputs] = x[rows, num_inputs] weight[num_outputs, num_inputs]^T (+ bias). bias
  // [num_outputs] is of out's type (the library's rule), null unless shape.bias. Pointers 16-byte
  // aligned. Ordered on: `stream`.
  void run(const MatmulShape& shape, const void* x, const void* weight, const void* bias, void* out,
           cudaStream_t stream);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace clo::kernels
