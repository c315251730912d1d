// Any bytes as a .safetensors file: whatever is accepted must lie inside the bytes, without
// overlap.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <span>

#include "base/check.h"
#include "io/safetensors.h"

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

#ifdef CLO_FUZZ_PLANTED
// No seed is like this: metadata, a tensor of rank 4 or more, and one of an unsupported type.
void planted_bug(const clo::SafetensorsFile& file) {
  bool is_deep = false;
  for (const auto& [name, view] : file.tensors()) is_deep = is_deep || view.shape.size() >= 4;
  if (is_deep && !file.unsupported_tensors().empty() && !file.metadata().empty()) std::abort();
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

// Half of the mutants get a header length that fits again; blind changes would rarely pass it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  std::minstd_rand random(seed);
  if (size <= kLengthBytes || random() % 2 == 0) return size;
  const uint8_t* const begin = data + kLengthBytes;
  const uint8_t* end = data + size;
  while (end != begin && end[-1] != '}') --end;
  const auto length = static_cast<uint64_t>(end - begin);
  for (size_t i = 0; i < kLengthBytes; ++i) data[i] = static_cast<uint8_t>(length >> (8 * i));
  return size;
}
