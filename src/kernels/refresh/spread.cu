#include "base/check.h"
#include "kernels/element.cuh"
#include "kernels/launch.cuh"
#include "kernels/refresh/spread.h"
#include "kernels/rows/stored_rows.cuh"
#include "kernels/rules.cuh"

namespace clo::kernels {

namespace {

constexpr int kSpreadWarps = 8;

// Element d of a stored row's key.
template <typename Element>
__device__ __forceinline__ float key_element(const KvShape& shape, const std::byte* row, int d) {
  switch (shape.stored) {
    case RowFormat::kInt8:
      return static_cast<float>(reinterpret_cast<const int8_t*>(row)[d]) *
             *reinterpret_cast<const float*>(row + 2 * shape.head_dim);
    case RowFormat::kFp8:
      return fp8_values(reinterpret_cast<const uint8_t*>(row)[d]).x;
    default:
      return Element::value(reinterpret_cast<const uint16_t*>(row)[d]);
  }
}

// A block for each head, warps over tokens, lanes over elements. Differences from the first token's
// key are summed, so that a mean far from zero costs no digits.
template <typename Element, int kElements>
__global__ void __launch_bounds__(32 * kSpreadWarps)
    key_spread_kernel(const __grid_constant__ KeySpread p) {
  const DecodeTables& t = p.tables;
  const auto layer = static_cast<int32_t>(blockIdx.x) / t.shape.num_kv_heads;
  const auto kv_head = static_cast<int32_t>(blockIdx.x) % t.shape.num_kv_heads;
  const int64_t index = table_index(t, p.slot, layer, kv_head);
  const std::byte* resident = t.heads[index].resident;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t count = p.context_tokens < kSpreadTokens ? p.context_tokens : kSpreadTokens;
  const auto row_of = [&](int64_t i) {
    const int64_t token = i * p.context_tokens / count;
    return resident != nullptr ? resident + token * stored_row_bytes(t.shape)
                               : host_row(t, t.slots[p.slot], layer, kv_head, token);
  };
  float pivot[kElements], sum[kElements] = {}, squares = 0;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    pivot[e] = key_element<Element>(t.shape, row_of(0), 32 * e + lane);
  }
  for (int64_t i = warp; i < count; i += kSpreadWarps) {
    const std::byte* row = row_of(i);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const float x = key_element<Element>(t.shape, row, 32 * e + lane) - pivot[e];
      sum[e] += x;
      squares += x * x;
    }
  }
  __shared__ float sums[kSpreadWarps][32 * kElements];
  __shared__ float squares_of[kSpreadWarps][32];
#pragma unroll
  for (int e = 0; e < kElements; ++e) sums[warp][32 * e + lane] = sum[e];
  squares_of[warp][lane] = squares;
  __syncthreads();
  if (warp != 0) return;
  // In a fixed order.
  const auto n = static_cast<float>(count);
  float left = 0;
  for (int w = 0; w < kSpreadWarps; ++w) left += squares_of[w][lane];
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    float total = 0;
    for (int w = 0; w < kSpreadWarps; ++w) total += sums[w][32 * e + lane];
    left -= total * total / n;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) left += __shfl_xor_sync(0xFFFFFFFFu, left, offset);
  if (lane == 0) {
    p.rules[index].drift_scale = t.scale * sqrtf(fmaxf(left, 0.0f) / (n * 32 * kElements));
  }
}

}  // namespace

void key_spread(const KeySpread& params, cudaStream_t stream) {
  const KvShape& shape = params.tables.shape;
  CLO_CHECK(params.context_tokens > 0, params.context_tokens);
  CLO_CHECK(shape.head_dim == 64 || shape.head_dim == 128, shape.head_dim);
  const dim3 grid(static_cast<unsigned>(shape.num_layers * shape.num_kv_heads));
  const dim3 block(32 * kSpreadWarps);
  const bool wide = shape.head_dim == 128;
  if (shape.type == DType::kBF16) {
    launch(wide ? key_spread_kernel<Bf16, 4> : key_spread_kernel<Bf16, 2>, grid, block, 0, stream,
           params);
  } else {
    launch(wide ? key_spread_kernel<F16, 4> : key_spread_kernel<F16, 2>, grid, block, 0, stream,
           params);
  }
}

}  // namespace clo::kernels
