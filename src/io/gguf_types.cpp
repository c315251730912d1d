#include "io/gguf_types.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "tensor/dtype.h"

namespace clo {

namespace {

constexpr int64_t kSuperBlock = 256;

constexpr std::array<GgmlTypeInfo, 15> kTypes = {{
    {GgmlType::kF32, "F32", 1, 4},
    {GgmlType::kF16, "F16", 1, 2},
    {GgmlType::kBF16, "BF16", 1, 2},
    {GgmlType::kQ4_0, "Q4_0", 32, 18},
    {GgmlType::kQ4_1, "Q4_1", 32, 20},
    {GgmlType::kQ5_0, "Q5_0", 32, 22},
    {GgmlType::kQ5_1, "Q5_1", 32, 24},
    {GgmlType::kQ8_0, "Q8_0", 32, 34},
    {GgmlType::kQ2_K, "Q2_K", kSuperBlock, 84},
    {GgmlType::kQ3_K, "Q3_K", kSuperBlock, 110},
    {GgmlType::kQ4_K, "Q4_K", kSuperBlock, 144},
    {GgmlType::kQ5_K, "Q5_K", kSuperBlock, 176},
    {GgmlType::kQ6_K, "Q6_K", kSuperBlock, 210},
    {GgmlType::kIQ4_NL, "IQ4_NL", 32, 18},
    {GgmlType::kIQ4_XS, "IQ4_XS", kSuperBlock, 136},
}};

struct OtherType {
  uint32_t number;
  std::string_view name;
};
constexpr OtherType kOtherTypes[] = {
    {9, "Q8_1"},   {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"},
    {21, "IQ3_S"}, {22, "IQ2_S"}, {24, "I8"},      {25, "I16"},    {26, "I32"},     {27, "I64"},
    {28, "F64"},   {29, "IQ1_M"}, {34, "TQ1_0"},   {35, "TQ2_0"},  {39, "MXFP4"},
};

// Values of the four bits of IQ4_NL and IQ4_XS.
constexpr std::array<int8_t, 16> kNonLinear = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

uint32_t byte_at(const std::byte* at) { return static_cast<uint32_t>(*at); }
int low(const std::byte* at) { return static_cast<int>(byte_at(at) & 0xF); }
int high(const std::byte* at) { return static_cast<int>(byte_at(at) >> 4); }
float half_at(const std::byte* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return f16_to_f32(bits);
}
uint32_t word_at(const std::byte* at) {
  uint32_t word = 0;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Element i of the first sixteen is the low half of byte i, of the second sixteen the high half.
void q4_0(const std::byte* b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>(low(b + 2 + i) - 8) * d;
    y[i + 16] = static_cast<float>(high(b + 2 + i) - 8) * d;
  }
}
void q4_1(const std::byte* b, float* y) {
  const float d = half_at(b), m = half_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    y[i] = static_cast<float>(low(b + 4 + i)) * d + m;
    y[i + 16] = static_cast<float>(high(b + 4 + i)) * d + m;
  }
}
// The fifth bit of element i is bit i of a word.
void q5_0(const std::byte* b, float* y) {
  const float d = half_at(b);
  const uint32_t fifth = word_at(b + 2);
  for (int i = 0; i < 16; ++i) {
    const int first = low(b + 6 + i) | static_cast<int>(fifth >> i & 1u) << 4;
    const int second = high(b + 6 + i) | static_cast<int>(fifth >> (i + 16) & 1u) << 4;
    y[i] = static_cast<float>(first - 16) * d;
    y[i + 16] = static_cast<float>(second - 16) * d;
  }
}
void q5_1(const std::byte* b, float* y) {
  const float d = half_at(b), m = half_at(b + 2);
  const uint32_t fifth = word_at(b + 4);
  for (int i = 0; i < 16; ++i) {
    const int first = low(b + 8 + i) | static_cast<int>(fifth >> i & 1u) << 4;
    const int second = high(b + 8 + i) | static_cast<int>(fifth >> (i + 16) & 1u) << 4;
    y[i] = static_cast<float>(first) * d + m;
    y[i + 16] = static_cast<float>(second) * d + m;
  }
}
void q8_0(const std::byte* b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 32; ++i) {
    y[i] = static_cast<float>(static_cast<int8_t>(byte_at(b + 2 + i))) * d;
  }
}

// Sixteen groups of sixteen: scale and minimum in four bits each, then two bits an element.
void q2_k(const std::byte* b, float* y) {
  const std::byte *scales = b, *bits = b + 16;
  const float d = half_at(b + 80), dmin = half_at(b + 82);
  for (int group = 0; group < 16; ++group) {
    const float scale = d * static_cast<float>(low(scales + group));
    const float minimum = dmin * static_cast<float>(high(scales + group));
    // Groups 2 j and 2 j + 1 of each half are bits 2 j of its 32 bytes.
    const std::byte* of_group = bits + group / 8 * 32 + group % 2 * 16;
    const int shift = group % 8 / 2 * 2;
    for (int i = 0; i < 16; ++i) {
      const auto q = static_cast<float>(byte_at(of_group + i) >> shift & 3u);
      *y++ = scale * q - minimum;
    }
  }
}
// The same with a third bit, which takes four away where it is not set, and scales of six bits.
void q3_k(const std::byte* b, float* y) {
  const std::byte *mask = b, *bits = b + 32, *scales = b + 96;
  const float d = half_at(b + 108);
  for (int group = 0; group < 16; ++group) {
    // Four bits lie in the first eight bytes (group 8 on: their high halves), two more in the last
    // four.
    const int four = group < 8 ? low(scales + group) : high(scales + group - 8);
    const int two = static_cast<int>(byte_at(scales + 8 + group % 4) >> (group / 4 * 2) & 3u);
    const float scale = d * static_cast<float>((four | two << 4) - 32);
    const std::byte* of_group = bits + group / 8 * 32 + group % 2 * 16;
    const std::byte* of_mask = mask + group % 2 * 16;
    const int shift = group % 8 / 2 * 2;
    for (int i = 0; i < 16; ++i) {
      const auto q = static_cast<int>(byte_at(of_group + i) >> shift & 3u);
      const bool third = (byte_at(of_mask + i) >> (group / 2) & 1u) != 0;
      *y++ = scale * static_cast<float>(q - (third ? 0 : 4));
    }
  }
}

struct ScaleAndMinimum {
  int scale, minimum;
};
// Eight pairs of six bits in twelve bytes.
ScaleAndMinimum packed_pair(const std::byte* scales, int j) {
  if (j < 4) {
    return {static_cast<int>(byte_at(scales + j) & 63u),
            static_cast<int>(byte_at(scales + j + 4) & 63u)};
  }
  return {low(scales + j + 4) | static_cast<int>(byte_at(scales + j - 4) >> 6) << 4,
          high(scales + j + 4) | static_cast<int>(byte_at(scales + j) >> 6) << 4};
}
// Eight groups of 32: four bits of each element, and a fifth from 32 more bytes where there are
// such.
void packed_groups(const std::byte* b, const std::byte* fifth, const std::byte* bits, float* y) {
  const float d = half_at(b), dmin = half_at(b + 2);
  for (int group = 0; group < 8; ++group) {
    const ScaleAndMinimum pair = packed_pair(b + 4, group);
    const float scale = d * static_cast<float>(pair.scale);
    const float minimum = dmin * static_cast<float>(pair.minimum);
    const std::byte* of_group = bits + group / 2 * 32;
    for (int i = 0; i < 32; ++i) {
      int q = group % 2 == 0 ? low(of_group + i) : high(of_group + i);
      if (fifth != nullptr) q |= static_cast<int>(byte_at(fifth + i) >> group & 1u) << 4;
      *y++ = scale * static_cast<float>(q) - minimum;
    }
  }
}
void q4_k(const std::byte* b, float* y) { packed_groups(b, nullptr, b + 16, y); }
void q5_k(const std::byte* b, float* y) { packed_groups(b, b + 16, b + 48, y); }
// Each half of 128: four runs of 32, their low four bits in 64 bytes, their high two in 32.
void q6_k(const std::byte* b, float* y) {
  const float d = half_at(b + 208);
  for (int half = 0; half < 2; ++half) {
    const std::byte *lows = b + half * 64, *highs = b + 128 + half * 32;
    const std::byte* scales = b + 192 + half * 8;
    for (int run = 0; run < 4; ++run) {
      for (int i = 0; i < 32; ++i) {
        const std::byte* at = lows + run % 2 * 32 + i;
        const int four = run < 2 ? low(at) : high(at);
        const int q = (four | static_cast<int>(byte_at(highs + i) >> (2 * run) & 3u) << 4) - 32;
        const auto scale = static_cast<int8_t>(byte_at(scales + run * 2 + i / 16));
        *y++ = d * static_cast<float>(scale) * static_cast<float>(q);
      }
    }
  }
}
void iq4_nl(const std::byte* b, float* y) {
  const float d = half_at(b);
  for (int i = 0; i < 16; ++i) {
    y[i] = d * static_cast<float>(kNonLinear[static_cast<size_t>(low(b + 2 + i))]);
    y[i + 16] = d * static_cast<float>(kNonLinear[static_cast<size_t>(high(b + 2 + i))]);
  }
}
void iq4_xs(const std::byte* b, float* y) {
  const float d = half_at(b);
  const uint32_t highs = byte_at(b + 2) | byte_at(b + 3) << 8;
  const std::byte *lows = b + 4, *bits = b + 8;
  for (int group = 0; group < 8; ++group) {
    const int four = group % 2 == 0 ? low(lows + group / 2) : high(lows + group / 2);
    const int two = static_cast<int>(highs >> (2 * group) & 3u);
    const float scale = d * static_cast<float>((four | two << 4) - 32);
    const std::byte* of_group = bits + group * 16;
    for (int i = 0; i < 16; ++i) {
      y[i] = scale * static_cast<float>(kNonLinear[static_cast<size_t>(low(of_group + i))]);
      y[i + 16] = scale * static_cast<float>(kNonLinear[static_cast<size_t>(high(of_group + i))]);
    }
    y += 32;
  }
}

using Block = void (*)(const std::byte*, float*);
Block block_of(GgmlType type) {
  switch (type) {
    case GgmlType::kQ4_0:
      return q4_0;
    case GgmlType::kQ4_1:
      return q4_1;
    case GgmlType::kQ5_0:
      return q5_0;
    case GgmlType::kQ5_1:
      return q5_1;
    case GgmlType::kQ8_0:
      return q8_0;
    case GgmlType::kQ2_K:
      return q2_k;
    case GgmlType::kQ3_K:
      return q3_k;
    case GgmlType::kQ4_K:
      return q4_k;
    case GgmlType::kQ5_K:
      return q5_k;
    case GgmlType::kQ6_K:
      return q6_k;
    case GgmlType::kIQ4_NL:
      return iq4_nl;
    case GgmlType::kIQ4_XS:
      return iq4_xs;
    case GgmlType::kF32:
    case GgmlType::kF16:
    case GgmlType::kBF16:
      break;
  }
  return nullptr;
}

}  // namespace

const GgmlTypeInfo* ggml_type_info(uint32_t type) {
  const auto* found = std::find_if(kTypes.begin(), kTypes.end(), [&](const GgmlTypeInfo& info) {
    return static_cast<uint32_t>(info.type) == type;
  });
  return found == kTypes.end() ? nullptr : found;
}

std::string ggml_type_name(uint32_t type) {
  if (const GgmlTypeInfo* info = ggml_type_info(type)) return std::string(info->name);
  for (const OtherType& other : kOtherTypes) {
    if (other.number == type) return std::string(other.name);
  }
  return "type " + std::to_string(type);
}

void dequantize(GgmlType type, const std::byte* source, float* target, int64_t count) {
  const GgmlTypeInfo* info = ggml_type_info(static_cast<uint32_t>(type));
  CLO_CHECK(info != nullptr && count % info->block_elements == 0, static_cast<uint32_t>(type),
            count);
  const Block block = block_of(type);
  if (block == nullptr) {
    const DType plain = type == GgmlType::kF32   ? DType::kF32
                        : type == GgmlType::kF16 ? DType::kF16
                                                 : DType::kBF16;
    return convert_to_f32(plain, source, target, count);
  }
  for (int64_t i = 0; i < count / info->block_elements; ++i) {
    block(source + i * info->block_bytes, target + i * info->block_elements);
  }
}

WeightBlocks blocks_for(std::span<const GgmlType> types) {
  const auto is_four = [](GgmlType type) {
    return type == GgmlType::kQ4_0 || type == GgmlType::kQ4_1 || type == GgmlType::kQ4_K;
  };
  const auto is_plain = [](GgmlType type) {
    return type == GgmlType::kF32 || type == GgmlType::kF16 || type == GgmlType::kBF16;
  };
  if (std::any_of(types.begin(), types.end(), is_plain)) return WeightBlocks::kNone;
  return std::all_of(types.begin(), types.end(), is_four) ? WeightBlocks::kQ4 : WeightBlocks::kInt8;
}

bool take_block_row(GgmlType type, WeightBlocks blocks, const std::byte* source, int64_t cols,
                    BlockRow& row) {
  const bool four = type == GgmlType::kQ4_0 || type == GgmlType::kQ4_1 || type == GgmlType::kQ4_K;
  const bool exact = (blocks == WeightBlocks::kQ4 && four) ||
                     (blocks == WeightBlocks::kInt8 && type == GgmlType::kQ8_0);
  if (!exact) return false;
  row.resize(cols);
  const GgmlTypeInfo* info = ggml_type_info(static_cast<uint32_t>(type));
  // Low halves of sixteen bytes, then high halves.
  const auto nibbles = [&](const std::byte* from, int8_t* code) {
    for (int i = 0; i < 16; ++i) {
      code[i] = static_cast<int8_t>(low(from + i));
      code[i + 16] = static_cast<int8_t>(high(from + i));
    }
  };
  for (int64_t b = 0; b < cols / kBlockInputs; ++b) {
    const auto at = static_cast<size_t>(b);
    int8_t* const code = row.code.data() + b * kBlockInputs;
    const std::byte* block = source + b * kBlockInputs / info->block_elements * info->block_bytes;
    float& scale = row.scale[at];
    float& minimum = row.minimum[at];
    minimum = 0;
    if (type == GgmlType::kQ8_0) {
      scale = half_at(block);
      std::memcpy(code, block + 2, kBlockInputs);
    } else if (type == GgmlType::kQ4_0) {
      scale = half_at(block);
      minimum = -8 * scale;
      nibbles(block + 2, code);
    } else if (type == GgmlType::kQ4_1) {
      scale = half_at(block);
      minimum = half_at(block + 2);
      nibbles(block + 4, code);
    } else {
      const auto group = static_cast<int>(b % 8);
      const ScaleAndMinimum pair = packed_pair(block + 4, group);
      scale = half_at(block) * static_cast<float>(pair.scale);
      minimum = -half_at(block + 2) * static_cast<float>(pair.minimum);
      const std::byte* bits = block + 16 + group / 2 * 32;
      for (int i = 0; i < 32; ++i) {
        code[i] = static_cast<int8_t>(group % 2 == 0 ? low(bits + i) : high(bits + i));
      }
    }
  }
  return true;
}

}  // namespace clo
