#include "kernels/linear/matmul.h"

#include <cublasLt.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/check.h"

namespace clo::kernels {

namespace {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " failed: " + cublasLtGetStatusName(status) + ": " +
                           cublasLtGetStatusString(status));
}
#define CLO_CUBLAS(call) check_cublas((call), #call)

// A library object and the call that ends it.
template <typename Handle, cublasStatus_t (*destroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (handle_ != nullptr) (void)destroy(handle_);
  }
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&&) = delete;
  Handle get() const { return handle_; }
  Handle* out() { return &handle_; }

 private:
  Handle handle_ = nullptr;
};
using Handle = Owned<cublasLtHandle_t, cublasLtDestroy>;
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// The library counts columns first: out^T [num_outputs, rows] = weight (transposed view) x^T.
struct Product {
  Operation operation;
  Layout weight, x, out;
  cublasLtMatmulAlgo_t algorithm = {};
};

struct ShapeHash {
  size_t operator()(const MatmulShape& s) const {
    size_t hash = 0;
    for (const int64_t value : {s.rows, s.num_outputs, s.num_inputs,
                                int64_t{s.out_type == DType::kF32} + 2 * s.bias + 4 * s.accumulate +
                                    8 * int64_t{s.type == DType::kF16}}) {
      hash = hash * 0x9E3779B97F4A7C15u + std::hash<int64_t>{}(value);
    }
    return hash;
  }
};

}  // namespace

struct Matmul::Impl {
  Handle handle;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  std::unordered_map<MatmulShape, Product, ShapeHash> products;

  Product make(const MatmulShape& shape) const;
  Product& find(const MatmulShape& shape) {
    const auto found = products.find(shape);
    return found != products.end() ? found->second
                                   : products.emplace(shape, make(shape)).first->second;
  }
};

Product Matmul::Impl::make(const MatmulShape& shape) const {
  CLO_CHECK(shape.rows >= 1 && shape.num_outputs >= 1 && shape.num_inputs >= 1, shape.rows,
            shape.num_outputs, shape.num_inputs);
  CLO_CHECK(shape.type == DType::kBF16 || shape.type == DType::kF16);
  CLO_CHECK(shape.out_type == DType::kF32 || (shape.out_type == shape.type && !shape.accumulate));
  const cudaDataType in_type = shape.type == DType::kBF16 ? CUDA_R_16BF : CUDA_R_16F;
  const cudaDataType out_type = shape.out_type == DType::kF32 ? CUDA_R_32F : in_type;
  const auto outputs = static_cast<uint64_t>(shape.num_outputs);
  const auto inputs = static_cast<uint64_t>(shape.num_inputs);
  const auto rows = static_cast<uint64_t>(shape.rows);

  Product p;
  CLO_CUBLAS(cublasLtMatmulDescCreate(p.operation.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  CLO_CUBLAS(cublasLtMatmulDescSetAttribute(p.operation.get(), CUBLASLT_MATMUL_DESC_TRANSA,
                                            &transpose, sizeof transpose));
  if (shape.bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    CLO_CUBLAS(cublasLtMatmulDescSetAttribute(p.operation.get(), CUBLASLT_MATMUL_DESC_EPILOGUE,
                                              &epilogue, sizeof epilogue));
    const auto bias_type = static_cast<int32_t>(out_type);
    CLO_CUBLAS(cublasLtMatmulDescSetAttribute(
        p.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof bias_type));
  }
  CLO_CUBLAS(
      cublasLtMatrixLayoutCreate(p.weight.out(), in_type, inputs, outputs, shape.num_inputs));
  CLO_CUBLAS(cublasLtMatrixLayoutCreate(p.x.out(), in_type, inputs, rows, shape.num_inputs));
  CLO_CUBLAS(cublasLtMatrixLayoutCreate(p.out.out(), out_type, outputs, rows, shape.num_outputs));

  Preference preference;
  CLO_CUBLAS(cublasLtMatmulPreferenceCreate(preference.out()));
  const auto workspace_limit = static_cast<uint64_t>(workspace_bytes);
  CLO_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference.get(),
                                                  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                  &workspace_limit, sizeof workspace_limit));
  // A row of a larger buffer is 16-byte aligned, no more; the library assumes 256 by default.
  const uint32_t alignment = 16;
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    CLO_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &alignment,
                                                    sizeof alignment));
  }
  cublasLtMatmulHeuristicResult_t best = {};
  int found = 0;
  CLO_CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle.get(), p.operation.get(), p.weight.get(),
                                            p.x.get(), p.out.get(), p.out.get(), preference.get(),
                                            1, &best, &found));
  if (found == 0) {
    throw std::runtime_error("cublasLt has no algorithm for a product of " +
                             std::to_string(shape.rows) + " rows, " +
                             std::to_string(shape.num_outputs) + " outputs, " +
                             std::to_string(shape.num_inputs) + " inputs");
  }
  p.algorithm = best.algo;
  return p;
}

Matmul::Matmul(void* workspace, int64_t workspace_bytes) : impl_(std::make_unique<Impl>()) {
  impl_->workspace = workspace;
  impl_->workspace_bytes = workspace_bytes;
  CLO_CUBLAS(cublasLtCreate(impl_->handle.out()));
}

Matmul::~Matmul() = default;

void Matmul::prepare(const MatmulShape& shape) { (void)impl_->find(shape); }

void Matmul::run(const MatmulShape& shape, const void* x, const void* weight, const void* bias,
                 void* out, cudaStream_t stream) {
  CLO_CHECK((bias != nullptr) == shape.bias);
  Product& p = impl_->find(shape);
  if (shape.bias) {
    CLO_CUBLAS(cublasLtMatmulDescSetAttribute(p.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                              &bias, sizeof bias));
  }
  const float alpha = 1, beta = shape.accumulate ? 1 : 0;
  CLO_CUBLAS(cublasLtMatmul(impl_->handle.get(), p.operation.get(), &alpha, weight, p.weight.get(),
                            x, p.x.get(), &beta, out, p.out.get(), out, p.out.get(), &p.algorithm,
                            impl_->workspace, static_cast<size_t>(impl_->workspace_bytes), stream));
}

}  // namespace clo::kernels
