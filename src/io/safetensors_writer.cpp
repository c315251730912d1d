#include "io/safetensors_writer.h"

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/units.h"

namespace clo {

namespace {

const char* file_type(DType type) {
  return type == DType::kF32 ? "F32" : (type == DType::kF16 ? "F16" : "BF16");
}

}  // namespace

std::string safetensors_bytes(std::span<const NewTensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  int64_t end = 0;
  for (const NewTensor& tensor : tensors) {
    int64_t count = 1;
    for (const int64_t extent : tensor.shape) count *= extent;
    CLO_CHECK(count > 0 && count == std::ssize(tensor.values), tensor.name, count,
              tensor.values.size());
    const int64_t begin = end;
    end += count * dtype_bytes(tensor.type);
    header[tensor.name] = {
        {"dtype", file_type(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize(static_cast<size_t>(round_up(std::ssize(text), 8)), ' ');

  std::string bytes;
  bytes.reserve(8 + text.size() + static_cast<size_t>(end));
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((text.size() >> (8 * i)) & 0xFF);
  bytes += text;
  size_t at = bytes.size();
  bytes.resize(at + static_cast<size_t>(end));
  for (const NewTensor& tensor : tensors) {
    const int64_t count = std::ssize(tensor.values);
    convert_from_f32(tensor.type, tensor.values.data(), bytes.data() + at, count);
    at += static_cast<size_t>(count * dtype_bytes(tensor.type));
  }
  return bytes;
}

}  // namespace clo
