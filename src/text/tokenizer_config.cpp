#include "text/tokenizer_config.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/utf8.h"

namespace clo {

namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxFileBytes = 512LL << 20;

Result<Json> parse_object(const std::string& text, const std::string& where) {
  Json parsed;
  try {
    parsed = Json::parse(text);
  } catch (const Json::exception& fault) {
    return Error{ErrorCode::kBadFile,
                 std::string("is not valid JSON") + explain_not_json(text) + ": " + fault.what(),
                 where};
  }
  if (!parsed.is_object()) {
    return Error{ErrorCode::kBadFile,
                 std::string("expected a JSON object, found ") + parsed.type_name(), where};
  }
  return parsed;
}

// "chat_template": a string, or a list of {"name", "template"} of which "default" counts.
Result<std::optional<std::string>> template_of(const Json& object, const std::string& where) {
  const auto found = object.find("chat_template");
  if (found == object.end() || found->is_null()) return std::optional<std::string>();
  if (found->is_string()) return std::optional(found->get<std::string>());
  if (!found->is_array()) {
    return Error{
        ErrorCode::kBadFile,
        std::string("chat_template: expected a string or a list, found ") + found->type_name(),
        where};
  }
  std::string names;
  for (const Json& entry : *found) {
    if (!entry.is_object() || !entry.contains("name") || !entry["name"].is_string() ||
        !entry.contains("template") || !entry["template"].is_string()) {
      return Error{ErrorCode::kBadFile,
                   "chat_template: each entry of the list needs a \"name\" and a \"template\"",
                   where};
    }
    const auto name = entry["name"].get<std::string>();
    if (name == "default") return std::optional(entry["template"].get<std::string>());
    names += (names.empty() ? "" : ", ") + name;
  }
  return Error{ErrorCode::kBadFile,
               "chat_template: none of the templates in the list is named \"default\" (found: " +
                   names + ")",
               where};
}

Status read_config(const Json& object, const std::string& where, TokenizerConfig& config) {
  for (const auto& [key, value] : object.items()) {
    if (!key.ends_with("_token")) continue;
    if (value.is_string()) {
      config.special_tokens[key] = value.get<std::string>();
    } else if (value.is_object() && value.contains("content") && value["content"].is_string()) {
      config.special_tokens[key] = value["content"].get<std::string>();
    }
  }
  const auto add_bos = object.find("add_bos_token");
  if (add_bos != object.end() && !add_bos->is_null()) {
    if (!add_bos->is_boolean()) {
      return Error{ErrorCode::kBadFile,
                   std::string("add_bos_token: expected true or false, found ") + add_bos->dump(),
                   where};
    }
    config.add_bos_token = add_bos->get<bool>();
  }
  return Ok{};
}

}  // namespace

std::string explain_not_json(const std::string& text) {
  if (text.empty()) return " (it is empty)";
  if (text.starts_with("version https://git-lfs"))
    return " (it is a Git LFS pointer: fetch the real file with \"git lfs pull\")";
  if (text[text.find_first_not_of(" \t\r\n") % text.size()] == '<')
    return " (it looks like an HTML page: download it again)";
  return "";
}

Result<std::optional<std::string>> read_text_file(const std::filesystem::path& path) {
  const std::string where = path.string();
  std::error_code fault;
  if (!std::filesystem::exists(path, fault)) {
    if (fault && fault != std::errc::no_such_file_or_directory)
      return Error{ErrorCode::kBadFile, "cannot be read: " + fault.message(), where};
    return std::optional<std::string>();
  }
  if (!std::filesystem::is_regular_file(path, fault))
    return Error{ErrorCode::kBadFile, "expected a file, found something else", where};
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path, fault));
  if (fault) return Error{ErrorCode::kBadFile, "cannot be read: " + fault.message(), where};
  if (size > kMaxFileBytes) {
    return Error{ErrorCode::kBadFile,
                 "is " + std::to_string(size) + " bytes long; at most 512 MiB are expected", where};
  }
  std::string text(static_cast<size_t>(size), '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size)) && size > 0)
    return Error{ErrorCode::kBadFile, "cannot be read to its end", where};
  return std::optional(std::move(text));
}

Result<TokenizerConfig> load_tokenizer_config(const std::filesystem::path& model_dir) {
  TokenizerConfig config;
  const auto config_path = model_dir / "tokenizer_config.json";
  CLO_ASSIGN(const auto config_text, read_text_file(config_path));
  if (config_text) {
    CLO_ASSIGN(const Json object, parse_object(*config_text, config_path.string()));
    CLO_TRY(read_config(object, config_path.string(), config));
    CLO_ASSIGN(config.chat_template, template_of(object, config_path.string()));
    config.chat_template_where = config_path.string() + " chat_template";
  }
  const auto json_path = model_dir / "chat_template.json";
  CLO_ASSIGN(const auto json_text, read_text_file(json_path));
  if (json_text) {
    CLO_ASSIGN(const Json object, parse_object(*json_text, json_path.string()));
    CLO_ASSIGN(auto found, template_of(object, json_path.string()));
    if (found) {
      config.chat_template = std::move(found);
      config.chat_template_where = json_path.string();
    }
  }
  const auto jinja_path = model_dir / "chat_template.jinja";
  CLO_ASSIGN(auto jinja_text, read_text_file(jinja_path));
  if (jinja_text) {
    config.chat_template = std::move(jinja_text);
    config.chat_template_where = jinja_path.string();
  }
  return config;
}

}  // namespace clo
