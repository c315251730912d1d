#pragma once
// Writes the small files that the tests of this room read: a folder that is removed at the end, a
// safetensors file from its parts, and checks on a refusal.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "clo/result.h"

namespace clo {

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "clo_io_XXXXXX").string();
    if (!::mkdtemp(name.data())) std::abort();
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, const std::string& content) const {
    const std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary).write(content.data(), std::streamsize(content.size()));
    return file;
  }

 private:
  std::filesystem::path path_;
};

// A file with this header text and these data bytes, length in front.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i)
    bytes += static_cast<char>((uint64_t{header.size()} >> (8 * i)) & 0xFF);
  return bytes + header + data;
}

// One entry of a header: "name":{...}.
inline std::string header_entry(const std::string& name, const std::string& dtype,
                                const std::string& shape, int64_t begin, int64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// A file of f32 vectors [length], each filled with its position in the list.
inline std::string vectors_file(const std::vector<std::string>& names, int64_t length = 4) {
  std::string header = "{";
  std::string data;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto begin = static_cast<int64_t>(data.size());
    header += (i ? "," : "") + header_entry(names[i], "F32", "[" + std::to_string(length) + "]",
                                            begin, begin + 4 * length);
    const std::vector<float> values(static_cast<size_t>(length), static_cast<float>(i));
    data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }
  return safetensors_bytes(header + "}", data);
}

inline std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Expects a refusal with this code whose text (where and message) holds every part.
template <typename T>
void expect_refused(const Result<T>& result, ErrorCode code,
                    const std::vector<std::string>& parts) {
  ASSERT_FALSE(result.has_value()) << "accepted; expected a refusal naming " << parts.front();
  const std::string text = result.error().to_string();
  EXPECT_EQ(code_name(result.error().code), code_name(code)) << text;
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is not in: " << text;
  }
}

}  // namespace clo
