#pragma once
// Codes of weights to pairs of 16-bit elements, exactly, a few bit operations a pair: a code is put
// into the mantissa of a number whose last place is 1; of bytes that number is taken off at once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/element.cuh"

namespace clo::kernels {

__device__ __forceinline__ uint32_t subtract_pair(Bf16, uint32_t a, uint32_t b) {
  const __nv_bfloat162 d = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                   *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&d);
}
__device__ __forceinline__ uint32_t subtract_pair(F16, uint32_t a, uint32_t b) {
  const __half2 d =
      __hsub2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&d);
}

// (a & mask) | base in one instruction: the compiler takes two when both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t base) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(mask), "r"(base));
  return out;
}

// Four signed bytes: `first` gets bytes 0 and 1, `second` 2 and 3.
template <typename Element>
__device__ __forceinline__ void widen_bytes(uint32_t codes, uint32_t& first, uint32_t& second) {
  if constexpr (std::is_same_v<Element, Bf16>) {
    // 128 + the low seven bits, less 128, or 256 where the sign is set: bf16 has seven bits of
    // mantissa, and the sign bit is the lowest of the exponent.
    constexpr uint32_t kBase = 0x43004300u;  // 128, 128
    const uint32_t low = __byte_perm(codes, 0, 0x4140), high = __byte_perm(codes, 0, 0x4342);
    first =
        subtract_pair(Element{}, and_or(low, 0x007F007Fu, kBase), and_or(low, 0x00800080u, kBase));
    second = subtract_pair(Element{}, and_or(high, 0x007F007Fu, kBase),
                           and_or(high, 0x00800080u, kBase));
  } else {
    // 1024 + (code + 128), less 1152.
    const uint32_t biased = codes ^ 0x80808080u;
    first = subtract_pair(Element{}, __byte_perm(biased, 0x64646464u, 0x4140), 0x64806480u);
    second = subtract_pair(Element{}, __byte_perm(biased, 0x64646464u, 0x4342), 0x64806480u);
  }
}

// Four e4m3 numbers, likewise.
template <typename Element>
__device__ __forceinline__ void widen_fp8(uint32_t codes, uint32_t& first, uint32_t& second) {
  const auto pair = [](uint32_t two) {
    const __half2_raw half =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    if constexpr (std::is_same_v<Element, F16>) {
      return static_cast<uint32_t>(half.x) | static_cast<uint32_t>(half.y) << 16;
    } else {
      const float2 v = __half22float2(__half2(half));
      return Element::pack(v.x, v.y);
    }
  };
  first = pair(codes & 0xFFFFu);
  second = pair(codes >> 16);
}

// Nibbles p and p + 4 of a word, plus nibble_base: 128 in bf16, 64 in f16.
template <typename Element>
inline constexpr float nibble_base = std::is_same_v<Element, Bf16> ? 128.0f : 64.0f;
template <typename Element, int p>
__device__ __forceinline__ uint32_t widen_nibbles(uint32_t codes) {
  // Places of 1 in bf16's 128; of 1/16 in f16's 64, so that a nibble stands four bits higher. A
  // base as small as can be, since it makes the sums larger that it is taken off.
  if constexpr (std::is_same_v<Element, Bf16>) {
    return and_or(codes >> (4 * p), 0x000F000Fu, 0x43004300u);
  } else {
    const uint32_t raised = p == 0 ? codes << 4 : codes >> (4 * (p - 1));
    return and_or(raised, 0x00F000F0u, 0x54005400u);
  }
}

// The operand registers of 16 inputs from a lane's codes: two words of bytes, or one of nibbles.
template <typename Element>
__device__ __forceinline__ void operand_of_bytes(uint32_t (&a)[4], uint32_t low, uint32_t high) {
  widen_bytes<Element>(low, a[0], a[1]);
  widen_bytes<Element>(high, a[2], a[3]);
}
template <typename Element>
__device__ __forceinline__ void operand_of_nibbles(uint32_t (&a)[4], uint32_t codes) {
  a[0] = widen_nibbles<Element, 0>(codes);
  a[1] = widen_nibbles<Element, 1>(codes);
  a[2] = widen_nibbles<Element, 2>(codes);
  a[3] = widen_nibbles<Element, 3>(codes);
}

}  // namespace clo::kernels
