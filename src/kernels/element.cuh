#pragma once
// The two 16-bit element types of weights, activations and token rows. A kernel takes one of them
// as a template argument; with_element() turns a DType into it. Device code and .cu files only.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "base/check.h"
#include "tensor/dtype.h"

namespace clo::kernels {

// Two floats as pairs of elements whose sum keeps about twice an element's bits of each: `high`
// rounded, `low` what that lost.
struct SplitPair {
  uint32_t high, low;
};

struct Bf16 {
  static constexpr DType kType = DType::kBF16;
  // Softmax weights are kept times 2^kWeightShift: see F16.
  static constexpr float kWeightShift = 0;

  // To nearest, ties to even; NaN as tensor/dtype.h makes it, so that rows agree bit for bit.
  static __device__ __forceinline__ uint16_t bits(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
  static __device__ __forceinline__ float value(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  // `first` lies in the low half, where memory has the lower address.
  static __device__ __forceinline__ uint32_t pack(float first, float second) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  }
};

struct F16 {
  static constexpr DType kType = DType::kF16;
  // Weights in [0, 1] would leave most of the range unused, and those of a long context fall below
  // 2^-24, the least that f16 tells from zero. Times 2^10 the same happens at 2^-34.
  static constexpr float kWeightShift = 10;

  static __device__ __forceinline__ uint16_t bits(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
      return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | 0x7E00u);
    }
    return __half_as_ushort(__float2half_rn(value));
  }
  static __device__ __forceinline__ float value(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
  }
  static __device__ __forceinline__ uint32_t pack(float first, float second) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return {value(static_cast<uint16_t>(pair & 0xFFFFu)), value(static_cast<uint16_t>(pair >> 16))};
  }
};

template <typename Element>
__device__ __forceinline__ SplitPair split(float first, float second) {
  SplitPair s;
  s.high = Element::pack(first, second);
  const float2 rounded = Element::unpack(s.high);
  s.low = Element::pack(first - rounded.x, second - rounded.y);
  return s;
}

// Calls `function` with an object of the element type. Fails by CLO_CHECK for other types.
template <typename Function>
void with_element(DType type, Function function) {
  CLO_CHECK(type == DType::kBF16 || type == DType::kF16, static_cast<int>(type));
  if (type == DType::kBF16) {
    function(Bf16{});
  } else {
    function(F16{});
  }
}

}  // namespace clo::kernels
