#include "reference/cpu_ops.h"

#include <dnnl.h>
#include <omp.h>

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/units.h"

namespace clo {

namespace {

// The least bytes of weights that one thread takes at a time.
constexpr int64_t kChunkBytes = 16 << 10;
// Rows of activations that one thread takes at a time in loops that do little to each.
constexpr int64_t kGrainRows = 16;
constexpr int64_t kGrainExponentials = 2048;
// The least block of a GEMM's result that one thread computes.
constexpr int64_t kGemmRows = 64;
constexpr int64_t kGemmWidth = 64;

}  // namespace

RowKind full_kind(const KvShape& shape) {
  return shape.type == DType::kF32   ? RowKind::kF32
         : shape.type == DType::kF16 ? RowKind::kF16
                                     : RowKind::kBF16;
}

RowKind stored_kind(const KvShape& shape) {
  return shape.stored == RowFormat::kInt8  ? RowKind::kInt8
         : shape.stored == RowFormat::kFp8 ? RowKind::kFp8
                                           : full_kind(shape);
}

const std::byte* stored_row(const KvShape& shape, const HeadTask& task, int64_t token) {
  if (task.head->is_resident()) return task.head->resident + token * shape.stored_row_bytes();
  return task.sequence->host_rows[token / kPageTokens] +
         (int64_t{task.kv_head} * kPageTokens + token % kPageTokens) * shape.stored_row_bytes();
}

CpuOps::CpuOps(ThreadPool& pool)
    : pool_(pool), simd_(simd_table()), tile_(static_cast<size_t>(pool.num_threads())) {}

CpuOps::CpuOps(int num_threads)
    : own_pool_(std::make_unique<ThreadPool>(num_threads)),
      pool_(*own_pool_),
      simd_(simd_table()),
      tile_(static_cast<size_t>(num_threads)) {}

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
  const int threads = pool_.num_threads();
  return std::string("cpu (") + simd_.name + ", " + std::to_string(threads) +
         (threads == 1 ? " thread)" : " threads)");
}

int64_t CpuOps::scratch_bytes_for(const KvShape& shape, int64_t matrix_rows, int64_t matrix_cols,
                                  int64_t step_rows, int64_t context_tokens, int64_t batch,
                                  bool widens) {
  constexpr int64_t kFloat = sizeof(float);
  const int64_t widened = !widens ? 0 : matrix_rows * matrix_cols * kFloat;
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
    if (p.table.blocks != WeightBlocks::kNone) {
      unpack_row(p.table.blocks, p.table.data, width, p.ids[t], p.out + t * width);
      continue;
    }
    simd_.to_f32(p.table.type, p.table.data + p.ids[t] * width * dtype_bytes(p.table.type),
                 p.out + t * width, width);
  }
}

void CpuOps::rms_norm(const RmsNormParams& p) {
  const auto normalise = [&](int64_t r) {
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
  };
  pool_.run_ranges(p.num_rows, kGrainRows, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) normalise(r);
  });
}

void CpuOps::linear(const LinearParams& p) {
  const WeightView& w = p.weight;
  const bool in_blocks = w.blocks != WeightBlocks::kNone;
  if (p.num_rows <= kSmallRows) {
    if (in_blocks) return linear_blocks(p);
    // Whole groups of 8 rows, so that a row is always computed by the same tile.
    const int64_t row_bytes = w.num_cols * dtype_bytes(w.type);
    const int64_t grain = round_up(divide_up(kChunkBytes, row_bytes), 8);
    pool_.run_ranges(w.num_rows, grain, [&](int64_t first, int64_t last) {
      simd_.linear(w.type, w.data, w.num_cols, first, last, p.x, p.num_rows, p.bias, p.out,
                   p.out_stride, p.accumulate);
    });
    return;
  }
  if (!in_blocks && w.type == DType::kF32) return gemm(p, reinterpret_cast<const float*>(w.data));
  const int64_t count = w.num_rows * w.num_cols;
  if (std::ssize(weight_f32_) < count) weight_f32_.resize(static_cast<size_t>(count));
  pool_.run_ranges(w.num_rows, 8, [&](int64_t first, int64_t last) {
    if (in_blocks) {
      for (int64_t row = first; row < last; ++row) {
        unpack_row(w.blocks, w.data, w.num_cols, row, weight_f32_.data() + row * w.num_cols);
      }
      return;
    }
    simd_.to_f32(w.type, w.data + first * w.num_cols * dtype_bytes(w.type),
                 weight_f32_.data() + first * w.num_cols, (last - first) * w.num_cols);
  });
  gemm(p, weight_f32_.data());
}

void CpuOps::linear_blocks(const LinearParams& p) {
  const WeightView& w = p.weight;
  CLO_CHECK(w.num_cols % kBlockInputs == 0, w.num_cols);
  const int64_t blocks = w.num_cols / kBlockInputs;
  activations_.resize(static_cast<size_t>(std::max(std::ssize(activations_), p.num_rows * blocks)));
  for (int64_t r = 0; r < p.num_rows; ++r) {
    simd_.quantize_activations(p.x + r * w.num_cols, w.num_cols, activations_.data() + r * blocks);
  }
  const BlockProduct product = {w.blocks,   w.data, w.num_rows, w.num_cols,   activations_.data(),
                                p.num_rows, p.bias, p.out,      p.out_stride, p.accumulate};
  const int64_t groups = divide_up(w.num_rows, kGroupRows);
  const int64_t grain = divide_up(kChunkBytes, blocks * block_group_bytes(w.blocks));
  pool_.run_ranges(groups, grain,
                   [&](int64_t first, int64_t last) { simd_.linear_blocks(product, first, last); });
}

void CpuOps::gemm(const LinearParams& p, const float* weight) {
  // The library would start threads of its own, which spin after every call beside the pool's.
  // So it is called from the pool's, with one thread each, for a block of the result: the rows
  // of x are cut first, then the rows of the weight.
  const int64_t cols = p.weight.num_cols, width = p.weight.num_rows;
  const int64_t threads = pool_.num_threads();
  const int64_t cuts_of_rows = std::clamp<int64_t>(p.num_rows / kGemmRows, 1, threads);
  const int64_t cuts_of_width =
      std::clamp<int64_t>(divide_up(threads, cuts_of_rows), 1, divide_up(width, kGemmWidth));
  const int64_t block_rows = round_up(divide_up(p.num_rows, cuts_of_rows), 8);
  const int64_t block_width = round_up(divide_up(width, cuts_of_width), 16);
  const int64_t across = divide_up(width, block_width);
  pool_.run(divide_up(p.num_rows, block_rows) * across, [&](int64_t chunk, int) {
    const int64_t row = chunk / across * block_rows, column = chunk % across * block_width;
    const int64_t rows = std::min(block_rows, p.num_rows - row);
    const int64_t columns = std::min(block_width, width - column);
    float* out = p.out + row * p.out_stride + column;
    omp_set_num_threads(1);  // a setting of this thread alone
    const dnnl_status_t status =
        dnnl_sgemm('N', 'T', rows, columns, cols, 1.0f, p.x + row * cols, cols,
                   weight + column * cols, cols, p.accumulate ? 1.0f : 0.0f, out, p.out_stride);
    CLO_CHECK(status == dnnl_success, status, rows, columns, cols);
    if (p.bias == nullptr) return;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < columns; ++n) out[r * p.out_stride + n] += p.bias[column + n];
    }
  });
}

void CpuOps::rotary_table(const RotaryTableParams& p) {
  const auto fill = [&](int64_t r) {
    float* cosine = p.cosine + r * p.half_dim;
    float* sine = p.sine + r * p.half_dim;
    for (int32_t i = 0; i < p.half_dim; ++i) {
      // The product is rounded to f32 as the reference implementation does; its cosine is then
      // taken exactly, since at large angles f32 library routines differ.
      const float angle = static_cast<float>(p.positions[r]) * p.inverse_frequencies[i];
      cosine[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * p.attention_factor;
      sine[i] = static_cast<float>(std::sin(static_cast<double>(angle))) * p.attention_factor;
    }
  };
  pool_.run_ranges(p.num_rows, kGrainRows, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) fill(r);
  });
}

void CpuOps::rotate(const RotateParams& p) {
  const int32_t half = p.head_dim / 2;
  const auto rotate_row = [&](int64_t r) {
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
  };
  pool_.run_ranges(p.num_rows, kGrainRows, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) rotate_row(r);
  });
}

void CpuOps::gated_silu(const GatedSiluParams& p) {
  const int64_t grain = std::max<int64_t>(1, kGrainExponentials / std::max<int64_t>(1, p.width));
  pool_.run_ranges(p.num_rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      const float* x = p.x + r * 2 * p.width;
      simd_.gated_silu(x, x + p.width, p.out + r * p.width, p.width);
    }
  });
}

}  // namespace clo
