#pragma once
// Vectors of eight floats for the loops in simd_loops.h: loads of each element type, sums of lanes,
// exp. Included by one source file per instruction set; everything is in an unnamed namespace.
#include <cstddef>
#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "tensor/dtype.h"

namespace clo {
namespace {

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

#define CLO_INLINE inline __attribute__((always_inline))
#define CLO_APART __attribute__((noinline))

CLO_INLINE F8 load8(const float* p) {
  F8 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
CLO_INLINE void store8(float* p, F8 v) { __builtin_memcpy(p, &v, sizeof v); }
CLO_INLINE F8 splat8(float x) { return F8{x, x, x, x, x, x, x, x}; }

// Eight bf16 values widened: the high half of an f32 is the bf16.
CLO_INLINE F8 load8_bf16(const std::byte* p) {
#if defined(__AVX2__)
  // One widening load; the generic conversion below becomes five instructions here.
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (F8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16);
#endif
  H8 half;
  __builtin_memcpy(&half, p, sizeof half);
  return (F8)(__builtin_convertvector(half, U8) << 16);
}
// Eight f16 values widened, exactly; NaN stays NaN.
CLO_INLINE F8 load8_f16(const std::byte* p) {
#if defined(__F16C__)
  return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  H8 half;
  __builtin_memcpy(&half, p, sizeof half);
  const U8 bits = __builtin_convertvector(half, U8);
  // With the mantissa in place the exponent is 112 too small, for subnormals too: a product mends
  // it. The largest exponent stands for infinity and NaN.
  const U8 magnitude = (bits & 0x7FFFu) << 13;
  const U8 finite = (U8)((F8)magnitude * splat8(0x1p112f));
  const U8 special = (U8)((bits & 0x7C00u) == 0x7C00u);
  const U8 sign = (bits & 0x8000u) << 16;
  return (F8)(sign | (special & (magnitude | 0x7F800000u)) | (~special & finite));
#endif
}
// Eight floats rounded to f16 as f32_to_f16 does it.
CLO_INLINE void store8_f16(std::byte* p, F8 v) {
#if defined(__F16C__)
  if (_mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q)) == 0) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
#endif
  for (int i = 0; i < 8; ++i) {
    const uint16_t half = f32_to_f16(v[i]);
    __builtin_memcpy(p + 2 * i, &half, 2);
  }
}
template <DType T>
CLO_INLINE F8 load8_as(const std::byte* p) {
  if constexpr (T == DType::kBF16) return load8_bf16(p);
  if constexpr (T == DType::kF16) return load8_f16(p);
  F8 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
// One value, by the same instructions.
template <DType T>
CLO_INLINE float load_one_as(const std::byte* p) {
  std::byte padded[32] = {};
  __builtin_memcpy(padded, p, T == DType::kF32 ? 4 : 2);
  return load8_as<T>(padded)[0];
}
// Sixteen values as two vectors, in the order that is cheapest to widen: for bf16 those of even and
// those of odd index (one load, one shift, one mask), otherwise as they lie. in_pairs() brings
// sixteen floats into the same order and from_pairs() back.
template <DType T>
CLO_INLINE void load_pair_as(const std::byte* p, F8& a, F8& b) {
  if constexpr (T == DType::kBF16) {
    U8 both;
    __builtin_memcpy(&both, p, sizeof both);
    a = (F8)(both << 16);
    b = (F8)(both & 0xFFFF0000u);
  } else {
    a = load8_as<T>(p);
    b = load8_as<T>(p + (T == DType::kF32 ? 32 : 16));
  }
}
template <DType T>
CLO_INLINE void in_pairs(F8& a, F8& b) {
  if constexpr (T != DType::kBF16) return;
  const F8 even = __builtin_shuffle(a, b, I8{0, 2, 4, 6, 8, 10, 12, 14});
  b = __builtin_shuffle(a, b, I8{1, 3, 5, 7, 9, 11, 13, 15});
  a = even;
}
template <DType T>
CLO_INLINE void from_pairs(F8& a, F8& b) {
  if constexpr (T != DType::kBF16) return;
  const F8 first = __builtin_shuffle(a, b, I8{0, 8, 1, 9, 2, 10, 3, 11});
  b = __builtin_shuffle(a, b, I8{4, 12, 5, 13, 6, 14, 7, 15});
  a = first;
}
template <DType T>
inline constexpr int kBytes = T == DType::kF32 ? 4 : 2;

// Sums of the lanes of eight vectors, as the lanes of one: a fixed tree, so the same on every path.
CLO_INLINE F8 sum_lanes(const F8* v) {
  F8 a[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], I8{0, 8, 2, 10, 4, 12, 6, 14}) +
           __builtin_shuffle(v[2 * i], v[2 * i + 1], I8{1, 9, 3, 11, 5, 13, 7, 15});
  }
  F8 b[2];
  for (int i = 0; i < 2; ++i) {
    b[i] = __builtin_shuffle(a[2 * i], a[2 * i + 1], I8{0, 1, 8, 9, 4, 5, 12, 13}) +
           __builtin_shuffle(a[2 * i], a[2 * i + 1], I8{2, 3, 10, 11, 6, 7, 14, 15});
  }
  return __builtin_shuffle(b[0], b[1], I8{0, 1, 2, 3, 8, 9, 10, 11}) +
         __builtin_shuffle(b[0], b[1], I8{4, 5, 6, 7, 12, 13, 14, 15});
}
CLO_INLINE float sum_lane(F8 v) {
  const F8 padded[8] = {v, F8{}, F8{}, F8{}, F8{}, F8{}, F8{}, F8{}};
  return sum_lanes(padded)[0];
}
CLO_INLINE F8 max8(F8 a, F8 b) { return a > b ? a : b; }
CLO_INLINE float max_lane(F8 v) {
  float best = v[0];
  for (int i = 1; i < 8; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// exp(x) for x <= 0 (and a little above), relative error below 3e-7; below -87 it is 0.
// x = n ln2 + r with |r| <= ln2/2; e^r by a polynomial of degree 6, 2^n by the exponent field.
CLO_INLINE F8 exp8(F8 x) {
  const F8 low = splat8(-87.0f);
  const auto below = x < low;
  x = x < low ? low : x;
  const F8 magic = splat8(12582912.0f);  // 1.5 * 2^23: rounds to an integer in the low bits
  const F8 n = (x * splat8(1.44269504f) + magic) - magic;
  F8 r = x - n * splat8(0.693145752f);
  r = r - n * splat8(1.42860677e-6f);
  F8 p = splat8(1.3888889e-3f);
  p = p * r + splat8(8.3333333e-3f);
  p = p * r + splat8(4.1666667e-2f);
  p = p * r + splat8(1.6666667e-1f);
  p = p * r + splat8(0.5f);
  p = p * r + splat8(1.0f);
  p = p * r + splat8(1.0f);
  const I8 exponent = (__builtin_convertvector(n, I8) + 127) << 23;
  const F8 value = p * (F8)exponent;
  return below ? F8{} : value;
}

}  // namespace
}  // namespace clo
