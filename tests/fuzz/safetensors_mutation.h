#pragma once
// Structured mutation for readers of safetensors files: most blind changes break the header's
// length or the tiling of the data, and what lies behind those checks would go untested.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <string_view>

#include "json_mutation.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace clo {

inline constexpr size_t kLengthBytes = 8;

inline void write_length(uint8_t* data, uint64_t length) {
  for (size_t i = 0; i < kLengthBytes; ++i) data[i] = static_cast<uint8_t>(length >> (8 * i));
}

// Length of the header when it ends at the last '}'.
inline size_t find_header_length(const uint8_t* data, size_t size) {
  while (size > kLengthBytes && data[size - 1] != '}') --size;
  return size - kLengthBytes;
}

// Rewrites all data_offsets so that the tensors tile the data, in the order of their names, and
// makes the data that long, of bytes that are a number in (0, 1) in F32, F16 and BF16. Returns the
// new size; the old one when the file cannot be mended.
inline size_t retile(uint8_t* data, size_t size, size_t max_size) {
  static const std::map<std::string, size_t> kBits = {{"F32", 32}, {"F16", 16}, {"BF16", 16},
                                                      {"I8", 8},   {"F4", 4},   {"F64", 64}};
  const uint8_t* const text = data + kLengthBytes;
  auto header = nlohmann::json::parse(text, text + find_header_length(data, size), nullptr, false);
  if (!header.is_object()) return size;
  size_t filled = 0;
  for (auto& [name, entry] : header.items()) {
    if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string()) continue;
    const auto type = kBits.find(entry["dtype"].get<std::string>());
    if (type == kBits.end() || !entry.contains("shape") || !entry["shape"].is_array()) continue;
    size_t bits = type->second;
    for (const auto& extent : entry["shape"]) {
      if (!extent.is_number_unsigned() || extent > 64 || bits > 8 * max_size) return size;
      bits *= extent.get<size_t>();
    }
    entry["data_offsets"] = {filled, filled + bits / 8};
    filled += bits / 8;
  }
  const std::string mended = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (kLengthBytes + mended.size() + filled > max_size) return size;
  write_length(data, mended.size());
  std::memcpy(data + kLengthBytes, mended.data(), mended.size());
  std::memset(data + kLengthBytes + mended.size(), 0x38, filled);
  return kLengthBytes + mended.size() + filled;
}

// Mutates blindly, or puts one of `fragments` into the header; then most mutants get a header
// length that fits again, and some offsets that tile the data again. Returns the new size.
inline size_t mutate_safetensors(uint8_t* data, size_t size, size_t max_size, unsigned seed,
                                 std::span<const std::string_view> fragments) {
  std::minstd_rand random(seed);
  if (size > kLengthBytes && random() % 4 == 0) {
    size = insert_json_fragment(data, kLengthBytes, size, max_size, fragments, random);
  } else {
    size = LLVMFuzzerMutate(data, size, max_size);
  }
  if (size <= kLengthBytes) return size;
  const auto choice = random() % 8;
  if (choice < 2) return retile(data, size, max_size);
  if (choice < 6) write_length(data, find_header_length(data, size));
  return size;
}

}  // namespace clo
