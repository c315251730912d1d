#pragma once
// GgufFile: metadata and tensors of a .gguf file, versions 2 and 3, as views into its bytes. A
// model that is split into NAME-00001-of-00003.gguf and so on is one GgufFile: the metadata of the
// first part, the tensors of all.
//
// Format (ggml): magic "GGUF", u32 version, u64 tensor count, u64 metadata count; metadata: key,
// u32 value type, value; tensors: name, u32 number of dimensions, u64 each (fastest first), u32
// type, u64 offset; padding to general.alignment (32); data. Strings are a u64 length and bytes;
// everything is little-endian.
//
// Opening reads what comes before the data; every view is checked against the file before it is
// handed out. Reading is safe from any thread.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "clo/result.h"
#include "io/gguf_types.h"
#include "io/mapped_file.h"
#include "tensor/view.h"

namespace clo {

// A value of the metadata. Integers of every width are int64_t (a uint64 above its range is
// refused), floats double. Arrays hold one of these kinds; arrays of arrays are refused.
using GgufArray = std::variant<std::vector<int64_t>, std::vector<double>, std::vector<bool>,
                               std::vector<std::string>>;
using GgufValue = std::variant<int64_t, double, bool, std::string, GgufArray>;

struct GgufTensor {
  uint32_t type = 0;                 // GgmlType, or a number that is not read here (ggml_type_info)
  Shape shape;                       // outermost first, as everywhere in this program
  const std::byte* bytes = nullptr;  // null where the type is not read
  int64_t num_bytes = 0;             // likewise 0
  size_t part = 0;                   // index into GgufFile::files()

  int64_t num_elements() const;
};

class GgufFile {
 public:
  // Maps and checks a file; of a split model the first part, from which the others are found.
  // Fails: kBadFile, naming the field or tensor, the parts that are missing, or the part that is of
  // another set; kUnsupported for another version or byte order.
  static Result<GgufFile> open(const std::filesystem::path& path);
  // The same for the bytes of one file in memory; `where` names them in messages.
  // Requires: `bytes` outlive the result, which points into them. Fails: as open().
  static Result<GgufFile> parse(std::span<const std::byte> bytes, std::string where);

  uint32_t version() const { return version_; }
  const std::map<std::string, GgufValue>& metadata() const { return metadata_; }
  const std::map<std::string, GgufTensor>& tensors() const { return tensors_; }
  int64_t data_bytes() const { return data_bytes_; }
  const std::string& where() const { return where_; }
  // The file that holds a tensor of this object.
  std::string where(const GgufTensor& tensor) const;
  std::vector<std::filesystem::path> files() const;  // the parts in order; none for parsed bytes

  // The value under a key. Fails: kBadFile when it is absent or of another kind.
  Result<std::string> text(const std::string& key) const;
  Result<int64_t> integer(const std::string& key) const;
  Result<double> number(const std::string& key) const;  // an integer will do

 private:
  GgufFile() = default;
  static Result<GgufFile> open_one(const std::filesystem::path& path);
  // Adds the tensors of another part. Fails: kBadFile for a tensor that is there already.
  Status take_in(GgufFile part);
  Error missing(const std::string& key, std::string_view kind) const;

  std::string where_;
  std::vector<MappedFile> files_;
  uint32_t version_ = 0;
  std::map<std::string, GgufValue> metadata_;
  std::map<std::string, GgufTensor> tensors_;
  int64_t data_bytes_ = 0;
};

}  // namespace clo
