#pragma once
// Writes GGUF files field by field, right ones and wrong ones.
#include <cstdint>
#include <string>
#include <vector>

namespace clo {

class GgufWriter {
 public:
  std::string bytes = "GGUF";

  template <typename T>
  GgufWriter& put(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  GgufWriter& text(const std::string& value) {
    put<uint64_t>(value.size());
    bytes += value;
    return *this;
  }
  GgufWriter& head(uint64_t tensors, uint64_t values, uint32_t version = 3) {
    return put(version).put(tensors).put(values);
  }
  GgufWriter& tensor(const std::string& name, std::vector<uint64_t> extents, uint32_t type,
                     uint64_t offset = 0) {
    text(name).put(static_cast<uint32_t>(extents.size()));
    for (const uint64_t extent : extents) put(extent);
    return put(type).put(offset);
  }
  GgufWriter& integer(const std::string& key, uint32_t value) {
    return text(key).put(uint32_t{4}).put(value);
  }
  GgufWriter& number(const std::string& key, float value) {
    return text(key).put(uint32_t{6}).put(value);
  }
  GgufWriter& words(const std::string& key, const std::string& value) {
    return text(key).put(uint32_t{8}).text(value);
  }
  GgufWriter& flag(const std::string& key, bool value) {
    return text(key).put(uint32_t{7}).put(static_cast<uint8_t>(value));
  }
  GgufWriter& texts(const std::string& key, const std::vector<std::string>& values) {
    text(key).put(uint32_t{9}).put(uint32_t{8}).put<uint64_t>(values.size());
    for (const std::string& value : values) text(value);
    return *this;
  }
  GgufWriter& integers(const std::string& key, const std::vector<int32_t>& values) {
    text(key).put(uint32_t{9}).put(uint32_t{5}).put<uint64_t>(values.size());
    for (const int32_t value : values) put(value);
    return *this;
  }
  GgufWriter& numbers(const std::string& key, const std::vector<float>& values) {
    text(key).put(uint32_t{9}).put(uint32_t{6}).put<uint64_t>(values.size());
    for (const float value : values) put(value);
    return *this;
  }
  // The data part.
  GgufWriter& data(size_t count) {
    bytes.resize((bytes.size() + 31) / 32 * 32 + count);
    return *this;
  }
};

}  // namespace clo
