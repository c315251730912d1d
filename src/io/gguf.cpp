#include "io/gguf.h"

#include <cstring>
#include <limits>
#include <utility>

#include "base/try.h"
#include "io/refusal.h"

namespace clo {

namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr int64_t kDefaultAlignment = 32;
constexpr uint32_t kMaxDimensions = 4;  // as ggml has them

enum class ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};

// Bytes that a value takes at least.
int64_t least_bytes(ValueType type) {
  switch (type) {
    case ValueType::kU8:
    case ValueType::kI8:
    case ValueType::kBool:
      return 1;
    case ValueType::kU16:
    case ValueType::kI16:
      return 2;
    case ValueType::kU32:
    case ValueType::kI32:
    case ValueType::kF32:
      return 4;
    default:
      return 8;
  }
}

// Reads on through the bytes; what it reads is inside them or refused.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const std::string& where)
      : bytes_(bytes), where_(where) {}

  int64_t position() const { return position_; }
  int64_t left() const { return std::ssize(bytes_) - position_; }

  // `what` names the field in messages, `part` what is read of it: joined only where that is said,
  // as vocabularies have many texts.
  template <typename T>
  Result<T> value(const std::string& what, std::string_view part = "") {
    if (left() < static_cast<int64_t>(sizeof(T))) return ends_in(std::string(part) + what);
    T result{};
    std::memcpy(&result, bytes_.data() + position_, sizeof result);
    position_ += static_cast<int64_t>(sizeof result);
    return result;
  }
  Result<std::string> text(const std::string& what) {
    CLO_ASSIGN(const uint64_t length, value<uint64_t>(what, "length of "));
    if (length > static_cast<uint64_t>(left())) {
      return bad_file(where_, what + " is said to be " + std::to_string(length) + " bytes long, " +
                                  std::to_string(left()) +
                                  " are left: the file is truncated or "
                                  "not a GGUF file");
    }
    std::string result(reinterpret_cast<const char*>(bytes_.data() + position_),
                       static_cast<size_t>(length));
    position_ += static_cast<int64_t>(length);
    return result;
  }

  Result<GgufValue> scalar(ValueType type, const std::string& what) {
    switch (type) {
      case ValueType::kU8:
        return integer<uint8_t>(what);
      case ValueType::kI8:
        return integer<int8_t>(what);
      case ValueType::kU16:
        return integer<uint16_t>(what);
      case ValueType::kI16:
        return integer<int16_t>(what);
      case ValueType::kU32:
        return integer<uint32_t>(what);
      case ValueType::kI32:
        return integer<int32_t>(what);
      case ValueType::kI64:
        return integer<int64_t>(what);
      case ValueType::kU64: {
        CLO_ASSIGN(const uint64_t number, value<uint64_t>(what));
        if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
          return bad_file(where_, what + " is " + std::to_string(number) +
                                      ", at most 2^63 - 1 is "
                                      "read");
        }
        return GgufValue(static_cast<int64_t>(number));
      }
      case ValueType::kF32: {
        CLO_ASSIGN(const float number, value<float>(what));
        return GgufValue(static_cast<double>(number));
      }
      case ValueType::kF64: {
        CLO_ASSIGN(const double number, value<double>(what));
        return GgufValue(number);
      }
      case ValueType::kBool: {
        CLO_ASSIGN(const uint8_t byte, value<uint8_t>(what));
        if (byte > 1) {
          return bad_file(
              where_, what + " is a truth value of " + std::to_string(byte) + ", expected 0 or 1");
        }
        return GgufValue(byte == 1);
      }
      case ValueType::kString: {
        CLO_ASSIGN(std::string found, text(what));
        return GgufValue(std::move(found));
      }
      case ValueType::kArray:
        break;
    }
    return unsupported(where_, what + " is an array of arrays, which is not read");
  }

  Result<GgufValue> any(const std::string& what) {
    CLO_ASSIGN(const ValueType type, value_type(what));
    if (type != ValueType::kArray) return scalar(type, what);
    CLO_ASSIGN(const ValueType of, value_type(what));
    CLO_ASSIGN(const uint64_t count, value<uint64_t>("length of " + what));
    // Before anything is allocated: a count that the file cannot hold is a broken file.
    if (count > static_cast<uint64_t>(left() / least_bytes(of))) {
      return bad_file(where_, what + " is said to have " + std::to_string(count) +
                                  " elements, more than the rest of the file can hold");
    }
    switch (of) {
      case ValueType::kString:
        return array<std::string>(of, count, what);
      case ValueType::kBool:
        return array<bool>(of, count, what);
      case ValueType::kF32:
      case ValueType::kF64:
        return array<double>(of, count, what);
      default:
        return array<int64_t>(of, count, what);
    }
  }

 private:
  Error ends_in(const std::string& what) const {
    return bad_file(where_, "ends in " + what + ": the file is truncated, download it again");
  }
  Result<ValueType> value_type(const std::string& what) {
    CLO_ASSIGN(const uint32_t type, value<uint32_t>("type of " + what));
    if (type > static_cast<uint32_t>(ValueType::kF64)) {
      return bad_file(where_,
                      what + " is of value type " + std::to_string(type) + ", expected 0 to 12");
    }
    return static_cast<ValueType>(type);
  }
  template <typename T>
  Result<GgufValue> integer(const std::string& what) {
    CLO_ASSIGN(const T number, value<T>(what));
    return GgufValue(static_cast<int64_t>(number));
  }
  template <typename T>
  Result<GgufValue> array(ValueType of, uint64_t count, const std::string& what) {
    std::vector<T> values;
    values.reserve(static_cast<size_t>(count));
    for (uint64_t i = 0; i < count; ++i) {
      CLO_ASSIGN(GgufValue value, scalar(of, what));
      values.push_back(std::get<T>(std::move(value)));
    }
    return GgufValue(GgufArray(std::move(values)));
  }

  std::span<const std::byte> bytes_;
  const std::string& where_;
  int64_t position_ = 0;
};

// A tensor as the header has it; its bytes are found when the data's begin is known.
struct Entry {
  std::string name;
  GgufTensor tensor;
  int64_t offset = 0;
};

Result<Entry> read_entry(Reader& reader, const std::string& where) {
  Entry entry;
  CLO_ASSIGN(entry.name, reader.text("a tensor's name"));
  const std::string tensor = "tensor " + in_quotes(entry.name);
  CLO_ASSIGN(const uint32_t dimensions, reader.value<uint32_t>("dimensions of " + tensor));
  if (dimensions < 1 || dimensions > kMaxDimensions) {
    return bad_file(where,
                    tensor + " has " + std::to_string(dimensions) + " dimensions, expected 1 to 4");
  }
  int64_t count = 1;
  for (uint32_t i = 0; i < dimensions; ++i) {
    CLO_ASSIGN(const uint64_t extent, reader.value<uint64_t>("dimensions of " + tensor));
    const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / 1024 / count);
    if (extent < 1 || extent > most) {
      return bad_file(where, tensor + " has a dimension of " + std::to_string(extent));
    }
    count *= static_cast<int64_t>(extent);
    entry.tensor.shape.insert(entry.tensor.shape.begin(), static_cast<int64_t>(extent));
  }
  CLO_ASSIGN(entry.tensor.type, reader.value<uint32_t>("type of " + tensor));
  CLO_ASSIGN(const uint64_t offset, reader.value<uint64_t>("offset of " + tensor));
  if (offset > static_cast<uint64_t>(std::numeric_limits<int64_t>::max() / 2)) {
    return bad_file(where, tensor + " begins at " + std::to_string(offset) + ", past every file");
  }
  entry.offset = static_cast<int64_t>(offset);
  const GgmlTypeInfo* info = ggml_type_info(entry.tensor.type);
  if (info == nullptr) return entry;
  if (entry.tensor.shape.back() % info->block_elements != 0) {
    return bad_file(where, tensor + " of type " + std::string(info->name) + " has rows of " +
                               std::to_string(entry.tensor.shape.back()) +
                               " elements, expected a multiple of " +
                               std::to_string(info->block_elements));
  }
  entry.tensor.num_bytes = count / info->block_elements * info->block_bytes;
  return entry;
}

}  // namespace

int64_t GgufTensor::num_elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

Result<GgufFile> GgufFile::parse(std::span<const std::byte> bytes, std::string where) {
  GgufFile file;
  file.where_ = std::move(where);
  const std::string& name = file.where_;
  if (std::ssize(bytes) < std::ssize(kMagic) ||
      std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return bad_file(name,
                    "does not begin with \"GGUF\": not a GGUF file, or one whose download "
                    "failed");
  }
  Reader reader(bytes, name);
  CLO_TRY(reader.value<uint32_t>("the magic"));
  CLO_ASSIGN(file.version_, reader.value<uint32_t>("the version"));
  if (file.version_ != 2 && file.version_ != 3) {
    const bool swapped = (file.version_ & 0xFFFFu) == 0 && file.version_ != 0;
    return unsupported(name, swapped
                                 ? "is a big-endian GGUF file, only little-endian ones are read"
                                 : "is a GGUF file of version " + std::to_string(file.version_) +
                                       ", versions 2 and 3 are read; convert the model anew");
  }
  CLO_ASSIGN(const uint64_t num_tensors, reader.value<uint64_t>("the number of tensors"));
  CLO_ASSIGN(const uint64_t num_values, reader.value<uint64_t>("the number of metadata values"));
  for (uint64_t i = 0; i < num_values; ++i) {
    CLO_ASSIGN(std::string key, reader.text("a metadata key"));
    CLO_ASSIGN(GgufValue value, reader.any("metadata " + in_quotes(key)));
    if (!file.metadata_.emplace(key, std::move(value)).second) {
      return bad_file(name, "metadata " + in_quotes(key) + " is there twice");
    }
  }
  int64_t alignment = kDefaultAlignment;
  if (file.metadata_.contains("general.alignment")) {
    CLO_ASSIGN(alignment, file.integer("general.alignment"));
    if (alignment < 8 || alignment > (1 << 20) || alignment % 8 != 0) {
      return bad_file(name, "general.alignment is " + std::to_string(alignment) +
                                ", expected a multiple of 8 up to 2^20");
    }
  }
  std::vector<Entry> entries;
  for (uint64_t i = 0; i < num_tensors; ++i) {
    CLO_ASSIGN(Entry entry, read_entry(reader, name));
    entries.push_back(std::move(entry));
  }
  const int64_t begin = (reader.position() + alignment - 1) / alignment * alignment;
  for (Entry& entry : entries) {
    const std::string tensor = "tensor " + in_quotes(entry.name);
    if (entry.offset % alignment != 0) {
      return bad_file(name, tensor + " begins at " + std::to_string(entry.offset) +
                                ", not a multiple of the alignment " + std::to_string(alignment));
    }
    const int64_t end = begin + entry.offset + entry.tensor.num_bytes;
    if (end > std::ssize(bytes)) {
      return bad_file(name, tensor + " ends at byte " + std::to_string(end) + ", the file has " +
                                std::to_string(std::ssize(bytes)) +
                                ": it is truncated, download it again");
    }
    if (entry.tensor.num_bytes > 0) entry.tensor.bytes = bytes.data() + begin + entry.offset;
    file.data_bytes_ += entry.tensor.num_bytes;
    if (!file.tensors_.emplace(entry.name, std::move(entry.tensor)).second) {
      return bad_file(name, tensor + " is there twice");
    }
  }
  return file;
}

Error GgufFile::missing(const std::string& key, std::string_view kind) const {
  return bad_file(where_,
                  "metadata " + in_quotes(key) +
                      (metadata_.contains(key) ? " is not " + std::string(kind)
                                               : " is missing, expected " + std::string(kind)));
}

Result<std::string> GgufFile::text(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end() || !std::holds_alternative<std::string>(found->second)) {
    return missing(key, "a text");
  }
  return std::get<std::string>(found->second);
}

Result<int64_t> GgufFile::integer(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end() || !std::holds_alternative<int64_t>(found->second)) {
    return missing(key, "an integer");
  }
  return std::get<int64_t>(found->second);
}

Result<double> GgufFile::number(const std::string& key) const {
  const auto found = metadata_.find(key);
  if (found != metadata_.end()) {
    if (const double* number = std::get_if<double>(&found->second)) return *number;
    if (const int64_t* whole = std::get_if<int64_t>(&found->second)) {
      return static_cast<double>(*whole);
    }
  }
  return missing(key, "a number");
}

}  // namespace clo
