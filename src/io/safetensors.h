#pragma once
// SafetensorsFile: the tensors of one .safetensors file, as views into its bytes.
//
// Format (huggingface/safetensors): u64 little-endian header length N, N bytes of JSON
// {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}, then
// the data. Offsets count from the end of the header; tensors tile the data without holes.
//
// Opening reads the header only; every view is checked against the file before it is handed out.
// Views may be unaligned. Reading is safe from any thread.
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "clo/result.h"
#include "io/mapped_file.h"
#include "tensor/view.h"

namespace clo {

class SafetensorsFile {
 public:
  // Maps and checks a file. Fails: kBadFile, naming the tensor or the header field.
  static Result<SafetensorsFile> open(const std::filesystem::path& path);

  // The same for bytes in memory; `where` names them in messages.
  // Requires: `bytes` outlive the result, which points into them. Fails: as open().
  static Result<SafetensorsFile> parse(std::span<const std::byte> bytes, std::string where);

  // Tensors of type F32, F16 and BF16.
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  // Tensors of any other type: name -> type as the file spells it, such as "F8_E4M3".
  const std::map<std::string, std::string>& unsupported_tensors() const {
    return unsupported_tensors_;
  }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Bytes of all tensors, supported or not.
  int64_t data_bytes() const { return data_bytes_; }
  const std::string& where() const { return where_; }

 private:
  SafetensorsFile() = default;

  std::string where_;
  std::optional<MappedFile> file_;
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> unsupported_tensors_;
  std::map<std::string, std::string> metadata_;
  int64_t data_bytes_ = 0;
};

}  // namespace clo
