#pragma once
// The JSON header of a .safetensors file, as it stands in the file: syntax and types are checked
// here, sizes and offsets by the caller (safetensors.cpp).
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "clo/result.h"
#include "tensor/view.h"

namespace clo {

struct SafetensorsEntry {
  std::string dtype;
  Shape shape;  // every extent is in [0, 2^63)
  int64_t begin = 0;
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
};

// Parses the header text in one pass, without building a document: memory is O(tensors).
// Fails: kBadFile for anything that is not such a header, including duplicate or unknown keys.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view json, const std::string& where);

}  // namespace clo
