#include "reference/cpu_ops.h"

#include <dnnl.h>
#include <omp.h>

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/units.h"

namespace clo {

namespace {

// Up to this many rows the vector loops beat a blocked GEMM, and give each row the same result
// whatever the batch.
constexpr int64_t kSmallBatch = 16;
// Work below this many bytes of weights is not worth waking threads for.
constexpr int64_t kParallelBytes = 32 << 10;

}  // namespace

CpuOps::CpuOps(int num_threads)
    : simd_(simd_table()), num_threads_(num_threads), tile_(static_cast<size_t>(num_threads)) {
  CLO_CHECK(num_threads >= 1, num_threads);
}

Status CpuOps::supports(const KvShape& shape) {
  if (shape.head_dim % 16 != 0 || shape.head_dim > kMaxHeadDim) {
    return Error{ErrorCode::kUnsupported,
                 "head_dim " + std::to_string(shape.head_dim) +
                     " is not supported: the CPU backend needs a multiple of 16 up to " +
                     std::to_string(kMaxHeadDim),
                 "config.json"};
  }
  if (shape.group_size() > kMaxGroup) {
    return Error{ErrorCode::kUnsupported,
                 std::to_string(shape.group_size()) +
                     " query heads per KV head are not supported; at most " +
                     std::to_string(kMaxGroup),
                 "config.json"};
  }
  return Ok{};
}

std::string CpuOps::description() const {
  return std::string("cpu (") + simd_.name + ", " + std::to_string(num_threads_) +
         (num_threads_ == 1 ? " thread)" : " threads)");
}

int64_t CpuOps::scratch_bytes_for(const KvShape& shape, int64_t matrix_rows, int64_t matrix_cols,
                                  int64_t step_rows, int64_t context_tokens, int64_t batch) {
  constexpr int64_t kFloat = sizeof(float);
  // A GEMM widens weights only above kSmallBatch rows, and the vocabulary never sees so many.
  const int64_t widened = shape.type == DType::kF32 ? 0 : matrix_rows * matrix_cols * kFloat;
  const int64_t pages = 2 * int64_t{kPageTokens} * shape.head_dim * shape.num_kv_heads * kFloat;
  const int64_t softmax = 2 * step_rows * shape.num_q_heads * kFloat;
  const int64_t rows = batch * shape.num_kv_heads * context_tokens * int64_t{sizeof(void*)};
  // What the GEMM library keeps after its first call, code it compiles and packed panels:
  // 4.5 MiB, and up to 3 MiB more for larger matrices (oneDNN 2.6, measured).
  constexpr int64_t kGemmLibrary = int64_t{8} << 20;
  return widened + pages + softmax + rows + kGemmLibrary;
}

void CpuOps::embed(const EmbedParams& p) {
  const int64_t width = p.table.num_cols;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    CLO_CHECK(p.ids[t] >= 0 && p.ids[t] < p.table.num_rows, p.ids[t], p.table.num_rows);
    simd_.to_f32(p.table.type, p.table.data + p.ids[t] * width * dtype_bytes(p.table.type),
                 p.out + t * width, width);
  }
}

void CpuOps::rms_norm(const RmsNormParams& p) {
#pragma omp parallel for schedule(static) num_threads(num_threads_) if (p.num_rows >= 32)
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const float* x = p.x + r * p.stride;
    float* out = p.out + r * p.stride;
    float lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= p.width; i += 8) {
      for (int j = 0; j < 8; ++j) lanes[j] += x[i + j] * x[i + j];
    }
    float sum = 0;
    for (const float lane : lanes) sum += lane;
    for (; i < p.width; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(p.width) + p.epsilon);
    for (i = 0; i < p.width; ++i) out[i] = x[i] * scale * p.weight[i];
  }
}

void CpuOps::linear(const LinearParams& p) {
  const WeightView& w = p.weight;
  if (p.num_rows <= kSmallBatch) {
    // Whole groups of 8 rows per thread, so that a row is always computed by the same tile.
    const int64_t groups = divide_up(w.num_rows, 8);
    const bool parallel = w.num_rows * w.num_cols * dtype_bytes(w.type) >= kParallelBytes;
#pragma omp parallel num_threads(num_threads_) if (parallel)
    {
      const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
      const int64_t first = groups * me / threads * 8;
      const int64_t last = std::min(groups * (me + 1) / threads * 8, w.num_rows);
      simd_.linear(w.type, w.data, w.num_cols, first, last, p.x, p.num_rows, p.bias, p.out,
                   p.out_stride, p.accumulate);
    }
    return;
  }
  const float* weight = reinterpret_cast<const float*>(w.data);
  if (w.type != DType::kF32) {
    const int64_t count = w.num_rows * w.num_cols;
    if (static_cast<int64_t>(weight_f32_.size()) < count) {
      weight_f32_.resize(static_cast<size_t>(count));
    }
#pragma omp parallel for schedule(static) num_threads(num_threads_)
    for (int64_t r = 0; r < w.num_rows; ++r) {
      simd_.to_f32(w.type, w.data + r * w.num_cols * dtype_bytes(w.type),
                   weight_f32_.data() + r * w.num_cols, w.num_cols);
    }
    weight = weight_f32_.data();
  }
  omp_set_num_threads(num_threads_);
  const dnnl_status_t status =
      dnnl_sgemm('N', 'T', p.num_rows, w.num_rows, w.num_cols, 1.0f, p.x, w.num_cols, weight,
                 w.num_cols, p.accumulate ? 1.0f : 0.0f, p.out, p.out_stride);
  CLO_CHECK(status == dnnl_success, status, p.num_rows, w.num_rows, w.num_cols);
  if (p.bias == nullptr) return;
#pragma omp parallel for schedule(static) num_threads(num_threads_)
  for (int64_t r = 0; r < p.num_rows; ++r) {
    for (int64_t n = 0; n < w.num_rows; ++n) p.out[r * p.out_stride + n] += p.bias[n];
  }
}

void CpuOps::rotary_table(const RotaryTableParams& p) {
#pragma omp parallel for schedule(static) num_threads(num_threads_) if (p.num_rows >= 16)
  for (int64_t r = 0; r < p.num_rows; ++r) {
    float* cosine = p.cosine + r * p.half_dim;
    float* sine = p.sine + r * p.half_dim;
    for (int32_t i = 0; i < p.half_dim; ++i) {
      // The product is rounded to f32 as the reference implementation does; its cosine is then
      // taken exactly, since at large angles f32 library routines differ.
      const float angle = static_cast<float>(p.positions[r]) * p.inverse_frequencies[i];
      cosine[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * p.attention_factor;
      sine[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * p.attention_factor;
    }
  }
}

void CpuOps::rotate(const RotateParams& p) {
  const int32_t half = p.head_dim / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads_) if (p.num_rows >= 16)
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const float* cosine = p.cosine + r * half;
    const float* sine = p.sine + r * half;
    for (int32_t h = 0; h < p.num_heads; ++h) {
      float* x = p.x + r * p.stride + int64_t{h} * p.head_dim;
      if (p.norm_weight != nullptr) {
        float sum = 0;
        for (int32_t i = 0; i < p.head_dim; ++i) sum += x[i] * x[i];
        const float scale = 1.0f / std::sqrt(sum / static_cast<float>(p.head_dim) + p.norm_epsilon);
        for (int32_t i = 0; i < p.head_dim; ++i) x[i] = x[i] * scale * p.norm_weight[i];
      }
      for (int32_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
      }
    }
  }
}

void CpuOps::gated_silu(const GatedSiluParams& p) {
#pragma omp parallel for schedule(static) num_threads(num_threads_) if (p.num_rows >= 16)
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const float* x = p.x + r * 2 * p.width;
    simd_.gated_silu(x, x + p.width, p.out + r * p.width, p.width);
  }
}

}  // namespace clo
