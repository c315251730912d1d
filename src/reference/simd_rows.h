#pragma once
// How the loops load each kind of token row. A row class has
//   kElement     bytes of a number
//   kScaled      whether what load_pair() gives must still be multiplied by the half's scale
//   kHasScales   whether the row brings its scales; otherwise kUnit is the scale
//   load_pair    sixteen numbers as two vectors, in the order that is cheapest to make; in_pairs()
//                brings sixteen floats into that order and from_pairs() back
// Everything is in an unnamed namespace; see simd_loops.h.
#include "reference/simd.h"
#include "reference/simd_vectors.h"

namespace clo {
namespace {

template <DType T>
struct FullRow {
  static constexpr int kElement = kBytes<T>;
  static constexpr bool kScaled = false, kHasScales = false;
  static constexpr float kUnit = 1;
  CLO_INLINE static void load_pair(const std::byte* p, F8& a, F8& b) { load_pair_as<T>(p, a, b); }
  CLO_INLINE static void in_pairs(F8& a, F8& b) { clo::in_pairs<T>(a, b); }
  CLO_INLINE static void from_pairs(F8& a, F8& b) { clo::from_pairs<T>(a, b); }
};

struct Int8Row {
  static constexpr int kElement = 1;
  static constexpr bool kScaled = true, kHasScales = true;
  static constexpr float kUnit = 1;
  CLO_INLINE static F8 load8_codes(const std::byte* p) {
#if defined(__AVX2__)
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (F8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(packed));
#else
    F8 v;  // one by one: the compiler's conversion of eight bytes takes twice as long
    for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
    return v;
#endif
  }
  CLO_INLINE static void load_pair(const std::byte* p, F8& a, F8& b) {
    a = load8_codes(p);
    b = load8_codes(p + 8);
  }
  CLO_INLINE static void in_pairs(F8&, F8&) {}
  CLO_INLINE static void from_pairs(F8&, F8&) {}
};

// Every e4m3 code's value, over Fp8Row::kUnit.
struct E4m3Table {
  float value[256];
  constexpr E4m3Table() : value() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code >> 3) & 15, mantissa = code & 7;
      float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-17f
                                      : static_cast<float>(8 + mantissa) * 0x1p-18f;
      for (int i = 0; i < exponent; ++i) magnitude *= 2;
      if ((code & 0x7F) == 0x7F) magnitude = __builtin_nanf("");
      value[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
    }
  }
};
static constexpr E4m3Table kE4m3;

struct Fp8Row {
  static constexpr int kElement = 1;
  static constexpr bool kScaled = true, kHasScales = false;
  // The bits of an e4m3 code in the place of an f16's are its value / 256: the exponent's bias is
  // eight smaller. What is left of the conversion is a product that the scale would cost anyway.
  static constexpr float kUnit = 256;
  CLO_INLINE static void load_pair(const std::byte* p, F8& a, F8& b) {
#if defined(__AVX2__) && defined(__F16C__)
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i wide = _mm256_cvtepi8_epi16(packed);  // the sign in every high bit
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7F));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
    const __m256i half =
        _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(wide, 7),
                                         _mm256_set1_epi16(static_cast<int16_t>(0xBF80))),
                        _mm256_and_si256(nan, _mm256_set1_epi16(0x7FFF)));
    a = (F8)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
    b = (F8)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#else
    for (int i = 0; i < 8; ++i) {
      a[i] = kE4m3.value[static_cast<uint8_t>(p[i])];
      b[i] = kE4m3.value[static_cast<uint8_t>(p[8 + i])];
    }
#endif
  }
  CLO_INLINE static void in_pairs(F8&, F8&) {}
  CLO_INLINE static void from_pairs(F8&, F8&) {}
};

// Calls of_kind.template operator()<Row>() with the row class of a kind.
template <typename OfKind>
CLO_INLINE void with_row(RowKind kind, const OfKind& of_kind) {
  switch (kind) {
    case RowKind::kF32:
      return of_kind.template operator()<FullRow<DType::kF32>>();
    case RowKind::kF16:
      return of_kind.template operator()<FullRow<DType::kF16>>();
    case RowKind::kBF16:
      return of_kind.template operator()<FullRow<DType::kBF16>>();
    case RowKind::kInt8:
      return of_kind.template operator()<Int8Row>();
    case RowKind::kFp8:
      return of_kind.template operator()<Fp8Row>();
  }
}

}  // namespace
}  // namespace clo
