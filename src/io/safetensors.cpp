#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <utility>
#include <vector>

#include "base/try.h"
#include "base/units.h"
#include "io/refusal.h"
#include "io/safetensors_header.h"

namespace clo {

namespace {

constexpr int64_t kLengthBytes = 8;  // the u64 in front of the header

// Element sizes in bits of the types a header may name; all but three are listed only.
struct FileType {
  std::string_view name;
  int64_t bits;
};
constexpr std::array<FileType, 20> kFileTypes = {
    {{"F32", 32},    {"F16", 16}, {"BF16", 16},   {"F64", 64},    {"BOOL", 8},
     {"U8", 8},      {"I8", 8},   {"U16", 16},    {"I16", 16},    {"U32", 32},
     {"I32", 32},    {"U64", 64}, {"I64", 64},    {"F8_E4M3", 8}, {"F8_E5M2", 8},
     {"F8_E8M0", 8}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"C64", 64}}};

std::optional<DType> supported_type(std::string_view name) {
  if (name == "F32") return DType::kF32;
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBF16;
  return std::nullopt;
}

// What stands in place of weights when the first bytes are no safetensors header.
std::string describe_impostor(std::string_view text) {
  std::string start(text.substr(0, 256));
  for (char& c : start) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const size_t first = start.find_first_not_of(" \t\r\n");
  const std::string_view body = std::string_view(start).substr(std::min(first, start.size()));
  if (body.starts_with("version https://git-lfs")) {
    return "is a Git LFS pointer, not the weights: run \"git lfs pull\" or download again";
  }
  if (body.starts_with("<!doctype html") || body.starts_with("<html")) {
    return "is an HTML page, not the weights: download again";
  }
  if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02")) {
    return "is a PyTorch pickle, not safetensors: use the model's .safetensors files, or convert "
           "it with save_pretrained(..., safe_serialization=True)";
  }
  if (text.starts_with("GGUF")) {
    return "is a GGUF file, not safetensors: use the model's .safetensors files";
  }
  if (body.starts_with("{")) return "is JSON text, not the weights: download again";
  return "";
}

Result<int64_t> read_header_length(std::span<const std::byte> bytes, const std::string& where) {
  const auto size = static_cast<int64_t>(bytes.size());
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (size == 0) return bad_file(where, "is empty: download again");
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes && i < bytes.size(); ++i) {
    length |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  }
  const bool fits = size >= kLengthBytes && length <= static_cast<uint64_t>(size - kLengthBytes);
  if (fits && length > 0 && text[kLengthBytes] == '{') return static_cast<int64_t>(length);
  if (std::string impostor = describe_impostor(text); !impostor.empty()) {
    return bad_file(where, std::move(impostor));
  }
  if (size < kLengthBytes) {
    return bad_file(where, "holds " + std::to_string(size) +
                               " bytes, too few for the length of a header: download again");
  }
  if (!fits) {
    return bad_file(where, "says its header has " + std::to_string(length) + " bytes, but only " +
                               std::to_string(size - kLengthBytes) +
                               " follow: the file is truncated or not safetensors, download again");
  }
  return bad_file(where, "has no JSON header, so it is not safetensors: download again");
}

struct Placed {
  const std::string* name;
  const SafetensorsEntry* entry;
};

// Bytes that shape x type asks for; nothing when the type is unknown. Every extent is positive.
Result<std::optional<int64_t>> expected_bytes(const Placed& tensor, const std::string& where) {
  const std::string shape = shape_text(tensor.entry->shape);
  int64_t count = 1;
  for (const int64_t extent : tensor.entry->shape) {
    if (extent == 0) {
      return bad_file(where, "tensor " + in_quotes(*tensor.name) + " has shape " + shape +
                                 ": a dimension of zero is refused");
    }
    const auto product = checked_mul(count, extent);
    if (!product) {
      return bad_file(where, "tensor " + in_quotes(*tensor.name) + " has shape " +
                                 in_quotes(shape) + ": the number of elements overflows");
    }
    count = *product;
  }
  const auto* const type =
      std::find_if(kFileTypes.begin(), kFileTypes.end(),
                   [&](const FileType& known) { return known.name == tensor.entry->dtype; });
  if (type == kFileTypes.end()) return std::optional<int64_t>();
  const auto bits = checked_mul(count, type->bits);
  if (!bits || *bits % 8 != 0) {
    return bad_file(where, "tensor " + in_quotes(*tensor.name) + " has shape " + in_quotes(shape) +
                               " and type " + tensor.entry->dtype +
                               ": that is no whole number of bytes below 2^60");
  }
  return std::optional<int64_t>(*bits / 8);
}

// Each tensor must fill its range, and the ranges must tile [0, data_bytes) without holes.
Status check_layout(const SafetensorsHeader& header, int64_t data_bytes, const std::string& where) {
  std::vector<Placed> placed;
  placed.reserve(header.entries.size());
  for (const auto& [name, entry] : header.entries) placed.push_back({&name, &entry});
  for (const Placed& tensor : placed) {
    CLO_ASSIGN(const std::optional<int64_t> expected, expected_bytes(tensor, where));
    const auto [begin, end] = std::pair(tensor.entry->begin, tensor.entry->end);
    const std::string range = "[" + std::to_string(begin) + ", " + std::to_string(end) + ")";
    if (end < begin || (expected && end - begin != *expected)) {
      return bad_file(
          where, "tensor " + in_quotes(*tensor.name) + " of type " +
                     in_quotes(tensor.entry->dtype) + " and shape " +
                     in_quotes(shape_text(tensor.entry->shape)) + " has data_offsets " + range +
                     (expected ? ", expected " + std::to_string(*expected) + " bytes" : ""));
    }
  }
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::pair(a.entry->begin, a.entry->end) < std::pair(b.entry->begin, b.entry->end);
  });
  int64_t filled = 0;
  const std::string* previous = nullptr;
  for (const Placed& tensor : placed) {
    if (tensor.entry->end > data_bytes) {
      return bad_file(where, "tensor " + in_quotes(*tensor.name) + " ends at byte " +
                                 std::to_string(tensor.entry->end) +
                                 " of the data, but the file "
                                 "holds " +
                                 std::to_string(data_bytes) + ": it is truncated, download again");
    }
    if (tensor.entry->begin < filled) {
      return bad_file(where, "tensors " + in_quotes(*previous) + " and " + in_quotes(*tensor.name) +
                                 " overlap at byte " + std::to_string(tensor.entry->begin));
    }
    if (tensor.entry->begin > filled) {
      return bad_file(where, std::to_string(tensor.entry->begin - filled) +
                                 " bytes in front of tensor " + in_quotes(*tensor.name) +
                                 " belong to no tensor");
    }
    filled = tensor.entry->end;
    previous = tensor.name;
  }
  if (filled != data_bytes) {
    return bad_file(where, std::to_string(data_bytes - filled) +
                               " bytes after the last tensor belong to no tensor: the file is "
                               "damaged, download again");
  }
  return Ok{};
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  CLO_ASSIGN(MappedFile mapped, MappedFile::open(path));
  CLO_ASSIGN(SafetensorsFile file, parse(mapped.bytes(), path.string()));
  file.file_ = std::move(mapped);
  return file;
}

Result<SafetensorsFile> SafetensorsFile::parse(std::span<const std::byte> bytes,
                                               std::string where) {
  CLO_ASSIGN(const int64_t length, read_header_length(bytes, where));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes,
                              static_cast<size_t>(length));
  CLO_ASSIGN(SafetensorsHeader header, parse_safetensors_header(text, where));
  const std::span<const std::byte> data = bytes.subspan(static_cast<size_t>(kLengthBytes + length));
  SafetensorsFile file;
  file.data_bytes_ = static_cast<int64_t>(data.size());
  CLO_TRY(check_layout(header, file.data_bytes_, where));
  for (auto& [name, entry] : header.entries) {
    if (const std::optional<DType> type = supported_type(entry.dtype)) {
      file.tensors_[name] = TensorView{data.data() + entry.begin, *type, std::move(entry.shape)};
    } else {
      file.unsupported_tensors_[name] = std::move(entry.dtype);
    }
  }
  file.metadata_ = std::move(header.metadata);
  file.where_ = std::move(where);
  return file;
}

}  // namespace clo
