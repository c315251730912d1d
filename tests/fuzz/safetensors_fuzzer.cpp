// Any bytes as a .safetensors file: whatever is accepted must lie inside the bytes, without
// overlap.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "base/check.h"
#include "io/safetensors.h"
#include "safetensors_mutation.h"

namespace {

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
  return clo::mutate_safetensors(data, size, max_size, seed, kFragments);
}
