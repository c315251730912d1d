#pragma once
// tokenizer_config.json and its neighbours: the names of special tokens, add_bos_token and the chat
// template. Read once at start; missing files are no fault. Holds no tokenizer.
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "clo/result.h"

namespace clo {

struct TokenizerConfig {
  // "bos_token", "eos_token", ... -> content, for each that is set.
  std::map<std::string, std::string> special_tokens;
  bool add_bos_token = false;
  // The template that transformers would use: chat_template.jinja, then chat_template.json, then
  // the field of tokenizer_config.json; and the file it came from.
  std::optional<std::string> chat_template;
  std::string chat_template_where;
};

// Fails: kBadFile for unreadable or malformed files.
Result<TokenizerConfig> load_tokenizer_config(const std::filesystem::path& model_dir);

// The content of a file, or nothing when it does not exist. Fails: kBadFile when it cannot be read
// or is larger than 512 MiB.
Result<std::optional<std::string>> read_text_file(const std::filesystem::path& path);

// Why a file that should hold JSON may not: a Git LFS pointer, an HTML page; otherwise empty.
std::string explain_not_json(const std::string& text);

}  // namespace clo
