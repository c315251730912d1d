#include "io/safetensors_header.h"

#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/refusal.h"

namespace clo {

namespace {

using nlohmann::json;

// The parser's events, in the order they may come:
//   root { name { dtype "..." | shape [n ...] | data_offsets [n n] } ... __metadata__ { k "v" } }
// Any other event ends the parse with a message in `fault`.
class HeaderReader : public json::json_sax_t {
 public:
  SafetensorsHeader header;
  std::string fault;

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return unexpected(std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets)
      return unexpected(std::to_string(value));
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max()))
      return unexpected(std::to_string(value));
    const auto number = static_cast<int64_t>(value);
    if (place_ == Place::kShape) {
      entry_.shape.push_back(number);
      return true;
    }
    if (num_offsets_ == 2) return unexpected("a third offset");
    (num_offsets_ == 0 ? entry_.begin : entry_.end) = number;
    ++num_offsets_;
    return true;
  }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(text); }
  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      header.metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") return unexpected(in_quotes(value));
    entry_.dtype = std::move(value);
    return true;
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kRoot;
        return true;
      case Place::kRoot:
        place_ = name_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
        has_metadata_ = has_metadata_ || place_ == Place::kMetadata;
        entry_ = {};
        has_dtype_ = has_shape_ = has_offsets_ = false;
        return true;
      default:
        return unexpected("an object");
    }
  }
  bool end_object() override {
    if (place_ == Place::kMetadata) {
      place_ = Place::kRoot;
    } else if (place_ == Place::kTensor) {
      if (!has_dtype_ || !has_shape_ || !has_offsets_) {
        const char* missing = !has_dtype_ ? "dtype" : (!has_shape_ ? "shape" : "data_offsets");
        return refuse("tensor " + in_quotes(name_) + " has no \"" + missing + "\" in the header");
      }
      header.entries[name_] = std::move(entry_);
      place_ = Place::kRoot;
    } else {
      place_ = Place::kEnd;
    }
    return true;
  }
  bool key(string_t& value) override {
    if (place_ == Place::kRoot) {
      if (header.entries.count(value) || (value == "__metadata__" && has_metadata_)) {
        return refuse("the header names tensor " + in_quotes(value) + " twice");
      }
      name_ = std::move(value);
      return true;
    }
    if (place_ == Place::kMetadata) {
      if (header.metadata.count(value)) {
        return refuse("the header names metadata key " + in_quotes(value) + " twice");
      }
      key_ = std::move(value);
      return true;
    }
    bool* seen = value == "dtype"          ? &has_dtype_
                 : value == "shape"        ? &has_shape_
                 : value == "data_offsets" ? &has_offsets_
                                           : nullptr;
    if (!seen)
      return refuse("tensor " + in_quotes(name_) + " has the unknown key " + in_quotes(value));
    if (*seen)
      return refuse("tensor " + in_quotes(name_) + " has the key " + in_quotes(value) + " twice");
    *seen = true;
    key_ = std::move(value);
    return true;
  }
  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype") return unexpected("a list");
    place_ = key_ == "shape" ? Place::kShape : Place::kOffsets;
    num_offsets_ = 0;
    return true;
  }
  bool end_array() override {
    if (place_ == Place::kOffsets && num_offsets_ != 2) return unexpected("too short a list");
    place_ = Place::kTensor;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return refuse("the header is not valid JSON at byte " + std::to_string(position) + " of it");
  }

 private:
  enum class Place { kStart, kRoot, kMetadata, kTensor, kShape, kOffsets, kEnd };

  bool refuse(std::string message) {
    if (fault.empty()) fault = std::move(message);
    return false;
  }
  bool unexpected(const std::string& found) {
    switch (place_) {
      case Place::kStart:
      case Place::kEnd:
        return refuse("the header must be a JSON object, found " + found);
      case Place::kRoot:
        return refuse("entry " + in_quotes(name_) + " of the header must be an object, found " +
                      found);
      case Place::kMetadata:
        return refuse("metadata key " + in_quotes(key_) + " must be a text, found " + found);
      case Place::kTensor:
      case Place::kShape:
      case Place::kOffsets:
        break;
    }
    const char* expected = key_ == "dtype"   ? "a text"
                           : key_ == "shape" ? "a list of sizes from 0 to 2^63 - 1"
                                             : "two offsets from 0 to 2^63 - 1";
    return refuse("tensor " + in_quotes(name_) + ": " + key_ + " must be " + expected + ", found " +
                  found);
  }

  Place place_ = Place::kStart;
  std::string name_;
  std::string key_;
  SafetensorsEntry entry_;
  bool has_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  int num_offsets_ = 0;
};

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::string_view text,
                                                   const std::string& where) {
  HeaderReader reader;
  if (!json::sax_parse(text.begin(), text.end(), &reader)) {
    return bad_file(where, reader.fault.empty() ? "the header cannot be parsed" : reader.fault);
  }
  return std::move(reader.header);
}

}  // namespace clo
