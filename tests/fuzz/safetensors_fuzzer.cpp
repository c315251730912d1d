// Any bytes as a .safetensors file: whatever is accepted must lie inside the bytes, without
// overlap.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"
#include "io/safetensors.h"
#include "json_mutation.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

constexpr size_t kLengthBytes = 8;

// Reads every byte of every tensor, so that the sanitizer sees a view that leaves the file.
void check_views(const clo::SafetensorsFile& file, std::span<const std::byte> bytes) {
  int64_t viewed = 0;
  unsigned sum = 0;
  for (const auto& [name, view] : file.tensors()) {
    CLO_CHECK(view.bytes >= bytes.data() && view.num_bytes() > 0, name);
    CLO_CHECK(view.bytes + view.num_bytes() <= bytes.data() + bytes.size(), name);
    for (int64_t i = 0; i < view.num_bytes(); ++i) sum += std::to_integer<unsigned>(view.bytes[i]);
    viewed += view.num_bytes();
  }
  CLO_CHECK(viewed <= file.data_bytes(), viewed, sum);
}

void write_length(uint8_t* data, uint64_t length) {
  for (size_t i = 0; i < kLengthBytes; ++i) data[i] = static_cast<uint8_t>(length >> (8 * i));
}

// Length of the header when it ends at the last '}'.
size_t find_header_length(const uint8_t* data, size_t size) {
  while (size > kLengthBytes && data[size - 1] != '}') --size;
  return size - kLengthBytes;
}

// Rewrites all data_offsets so that the tensors tile the data, in the order of their names, and
// makes the data that long. Returns the new size; the old one when the file cannot be mended.
size_t retile(uint8_t* data, size_t size, size_t max_size) {
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
  std::memset(data + kLengthBytes + mended.size(), 0x5A, filled);
  return kLengthBytes + mended.size() + filled;
}

#ifdef CLO_FUZZ_PLANTED
// No seed is like this: metadata, half-byte elements (which only tile whole bytes in pairs), and a
// tensor of rank 3 or more whose type is not that of another one.
void planted_bug(const clo::SafetensorsFile& file) {
  bool is_deep = false, has_half_bytes = false, has_f16 = false, has_bf16 = false;
  for (const auto& [name, view] : file.tensors()) {
    is_deep = is_deep || view.shape.size() >= 3;
    has_f16 = has_f16 || view.type == clo::DType::kF16;
    has_bf16 = has_bf16 || view.type == clo::DType::kBF16;
  }
  for (const auto& [name, type] : file.unsupported_tensors()) {
    has_half_bytes = has_half_bytes || type == "F4";
  }
  if (is_deep && has_half_bytes && has_f16 && has_bf16 && !file.metadata().empty()) std::abort();
}
#endif

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto file = clo::SafetensorsFile::parse(bytes, "input");
  if (!file) {
    CLO_CHECK(!file.error().message.empty());
    return 0;
  }
  check_views(*file, bytes);
#ifdef CLO_FUZZ_PLANTED
  planted_bug(*file);
#endif
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr std::array<std::string_view, 4> kFragments = {
      "1,", "\"__metadata__\":{\"k\":\"v\"},",
      "\"y\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]},",
      "\"z\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[1,3]},"};
  std::minstd_rand random(seed);
  if (size > kLengthBytes && random() % 4 == 0) {
    size = clo::insert_json_fragment(data, kLengthBytes, size, max_size, kFragments, random);
  } else {
    size = LLVMFuzzerMutate(data, size, max_size);
  }
  if (size <= kLengthBytes) return size;
  // Most mutants get a header length that fits again, and some offsets that tile the data again:
  // blind changes would rarely pass those checks, and what lies behind them would go untested.
  const auto choice = random() % 8;
  if (choice < 2) return retile(data, size, max_size);
  if (choice < 6) write_length(data, find_header_length(data, size));
  return size;
}
