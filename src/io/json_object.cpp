#include "io/json_object.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/try.h"
#include "io/mapped_file.h"
#include "io/refusal.h"

namespace clo {

using nlohmann::json;

// A value inside a document that `root` keeps alive.
struct JsonObject::Node {
  std::shared_ptr<const json> root;
  const json* value;

  // The value under `key`, or null when it is absent or JSON's null.
  const json* find(const std::string& key) const {
    const auto found = value->find(key);
    return found == value->end() || found->is_null() ? nullptr : &*found;
  }
};

namespace {

constexpr int kMaxDepth = 64;

std::optional<int64_t> as_integer(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  return std::nullopt;
}

// Notices, while the parser runs, what a finished document no longer shows.
struct Watch {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  std::string fault;

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxDepth) {
      fault = "is nested more than " + std::to_string(kMaxDepth) + " levels deep";
      return false;
    }
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.empty()) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second && fault.empty()) {
        fault = "has the key " + in_quotes(key) + " twice in one object";
      }
    }
    return true;
  }
};

}  // namespace

Result<JsonObject> JsonObject::parse(std::string_view text, std::string where) {
  Watch watch;
  auto root = std::make_shared<json>();
  try {
    *root = json::parse(text.begin(), text.end(),
                        [&watch](int depth, json::parse_event_t event, json& parsed) {
                          return watch(depth, event, parsed);
                        });
  } catch (const json::parse_error& fault) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string_view::npos) {
      return bad_file(std::move(where), "is empty, not valid JSON: download again");
    }
    if (text[first] == '<') {
      return bad_file(std::move(where), "is an HTML page, not JSON: download again");
    }
    if (text.substr(first).starts_with("version https://git-lfs")) {
      return bad_file(std::move(where),
                      "is a Git LFS pointer, not JSON: run \"git lfs pull\" or download again");
    }
    return bad_file(std::move(where), "is not valid JSON at byte " + std::to_string(fault.byte));
  } catch (const json::out_of_range&) {
    return bad_file(std::move(where), "holds a number too large for any type");
  }
  if (!watch.fault.empty()) return bad_file(std::move(where), std::move(watch.fault));
  if (!root->is_object()) return bad_file(std::move(where), "must hold a JSON object");
  const json* const value = root.get();
  return JsonObject(std::make_shared<const Node>(Node{std::move(root), value}), std::move(where),
                    "");
}

Result<JsonObject> JsonObject::read(const std::filesystem::path& path, int64_t max_bytes) {
  CLO_ASSIGN(const MappedFile file, MappedFile::open(path));
  const auto size = static_cast<int64_t>(file.bytes().size());
  if (size > max_bytes) {
    return bad_file(path.string(), "has " + std::to_string(size) + " bytes, at most " +
                                       std::to_string(max_bytes) + " are expected of such a file");
  }
  if (size == 0) return bad_file(path.string(), "is empty: download again");
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  if (text.starts_with("version https://git-lfs")) {
    return bad_file(path.string(), "is a Git LFS pointer: run \"git lfs pull\" or download again");
  }
  return parse(text, path.string());
}

bool JsonObject::has(const std::string& key) const { return node_->find(key) != nullptr; }

std::vector<std::string> JsonObject::keys() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : node_->value->items()) names.push_back(name);
  return names;
}

Error JsonObject::wrong_type(const std::string& key, std::string_view expected) const {
  const json* const found = node_->find(key);
  const bool is_short = found && !found->is_structured();
  std::string shown = found ? found->type_name() : "null";
  if (is_short)
    shown += " " + in_quotes(found->dump(-1, ' ', true, json::error_handler_t::replace));
  return bad_file(
      where_, "\"" + full_key(key) + "\" must be " + std::string(expected) + ", found " + shown);
}

Result<std::optional<int64_t>> JsonObject::integer(const std::string& key) const {
  const json* const found = node_->find(key);
  if (!found) return std::optional<int64_t>();
  const std::optional<int64_t> value = as_integer(*found);
  if (!value) return wrong_type(key, "an integer");
  return value;
}

Result<std::optional<double>> JsonObject::number(const std::string& key) const {
  const json* const found = node_->find(key);
  if (!found) return std::optional<double>();
  if (!found->is_number() || !std::isfinite(found->get<double>())) {
    return wrong_type(key, "a number");
  }
  return std::optional<double>(found->get<double>());
}

Result<std::optional<bool>> JsonObject::boolean(const std::string& key) const {
  const json* const found = node_->find(key);
  if (!found) return std::optional<bool>();
  if (!found->is_boolean()) return wrong_type(key, "true or false");
  return std::optional<bool>(found->get<bool>());
}

Result<std::optional<std::string>> JsonObject::text(const std::string& key) const {
  const json* const found = node_->find(key);
  if (!found) return std::optional<std::string>();
  if (!found->is_string()) return wrong_type(key, "a text");
  return std::optional<std::string>(found->get_ref<const std::string&>());
}

Result<std::optional<std::vector<std::string>>> JsonObject::texts(const std::string& key) const {
  const json* const found = node_->find(key);
  if (!found) return std::optional<std::vector<std::string>>();
  std::vector<std::string> items;
  if (!found->is_array()) return wrong_type(key, "a list of texts");
  for (const json& item : *found) {
    if (!item.is_string()) return wrong_type(key, "a list of texts");
    items.push_back(item.get_ref<const std::string&>());
  }
  return std::optional(std::move(items));
}

Result<std::optional<std::vector<int64_t>>> JsonObject::integers(const std::string& key) const {
  const json* const found = node_->find(key);
  if (!found) return std::optional<std::vector<int64_t>>();
  std::vector<int64_t> items;
  if (found->is_array()) {
    for (const json& item : *found) {
      const std::optional<int64_t> value = as_integer(item);
      if (!value) return wrong_type(key, "an integer or a list of integers");
      items.push_back(*value);
    }
  } else {
    const std::optional<int64_t> value = as_integer(*found);
    if (!value) return wrong_type(key, "an integer or a list of integers");
    items.push_back(*value);
  }
  return std::optional(std::move(items));
}

Result<std::optional<JsonObject>> JsonObject::object(const std::string& key) const {
  const json* const found = node_->find(key);
  if (!found) return std::optional<JsonObject>();
  if (!found->is_object()) return wrong_type(key, "an object");
  return std::optional(JsonObject(std::make_shared<const Node>(Node{node_->root, found}), where_,
                                  full_key(key) + "."));
}

}  // namespace clo
