#include "text/gguf_tokenizer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/try.h"

namespace clo {

namespace {

using Json = nlohmann::json;

// Kinds of tokens, as ggml numbers them.
constexpr int64_t kControl = 3, kUserDefined = 4;

struct Pattern {
  std::string_view name;  // tokenizer.ggml.pre
  std::string_view split;
  bool ignore_merges;  // a word that is a token is not merged from its bytes
  bool nfc;
  bool begins;  // adds BOS where the file does not say
};

constexpr std::string_view kLlama3Split =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Split =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kGpt2Split =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// Every digit by itself first, then GPT-2's split of what lies between: the space before a digit
// ends such a piece.
constexpr std::string_view kSmolLmSplit =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+)";

constexpr Pattern kPatterns[] = {
    {"llama-bpe", kLlama3Split, true, false, true}, {"llama-v3", kLlama3Split, true, false, true},
    {"llama3", kLlama3Split, true, false, true},    {"qwen2", kQwen2Split, false, true, false},
    {"gpt-2", kGpt2Split, false, false, false},     {"smollm", kSmolLmSplit, false, false, false},
};

Error bad(const GgufFile& file, std::string message) {
  return Error{ErrorCode::kBadFile, std::move(message), file.where()};
}

template <typename T>
Result<const std::vector<T>*> list(const GgufFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found != file.metadata().end()) {
    if (const GgufArray* array = std::get_if<GgufArray>(&found->second)) {
      if (const auto* values = std::get_if<std::vector<T>>(array)) return values;
    }
  }
  return bad(file, "metadata \"" + key + "\" is missing or of another kind, expected a list");
}

bool has(const GgufFile& file, const std::string& key) { return file.metadata().contains(key); }

// A token of the vocabulary by the metadata that names its id; nothing where there is none.
Result<std::optional<std::string>> token_of(const GgufFile& file, const std::string& key,
                                            const std::vector<std::string>& tokens) {
  if (!has(file, key)) return std::optional<std::string>();
  CLO_ASSIGN(const int64_t id, file.integer(key));
  if (id < 0 || id >= std::ssize(tokens)) {
    return bad(file, "metadata \"" + key + "\" is " + std::to_string(id) + ", the vocabulary has " +
                         std::to_string(tokens.size()) + " tokens");
  }
  return std::optional(tokens[static_cast<size_t>(id)]);
}

Result<const Pattern*> pattern_of(const GgufFile& file) {
  std::string name = "default";
  if (has(file, "tokenizer.ggml.pre")) {
    CLO_ASSIGN(name, file.text("tokenizer.ggml.pre"));
  }
  std::string known;
  for (const Pattern& pattern : kPatterns) {
    if (pattern.name == name) return &pattern;
    known += (known.empty() ? "" : ", ") + std::string(pattern.name);
  }
  return Error{ErrorCode::kUnsupported,
               "\"tokenizer.ggml.pre\" is \"" + name + "\"; known split patterns are " + known,
               file.where()};
}

Json added_token(size_t id, const std::string& content, bool special) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

}  // namespace

Result<std::string> gguf_tokenizer_json(const GgufFile& file) {
  CLO_ASSIGN(const std::string kind, file.text("tokenizer.ggml.model"));
  if (kind != "gpt2") {
    return Error{
        ErrorCode::kUnsupported,
        "\"tokenizer.ggml.model\" is \"" + kind + "\"; only byte-level BPE (gpt2) is supported",
        file.where()};
  }
  CLO_ASSIGN(const Pattern* const pattern, pattern_of(file));
  CLO_ASSIGN(const auto* const tokens, list<std::string>(file, "tokenizer.ggml.tokens"));
  CLO_ASSIGN(const auto* const merges, list<std::string>(file, "tokenizer.ggml.merges"));
  CLO_ASSIGN(const auto* const types, list<int64_t>(file, "tokenizer.ggml.token_type"));
  if (types->size() != tokens->size()) {
    return bad(file, "has " + std::to_string(tokens->size()) + " tokens and " +
                         std::to_string(types->size()) + " token types");
  }
  Json vocab = Json::object(), added = Json::array();
  for (size_t id = 0; id < tokens->size(); ++id) {
    const int64_t type = (*types)[id];
    if (type == kControl || type == kUserDefined) {
      added.push_back(added_token(id, (*tokens)[id], type == kControl));
    } else {
      vocab[(*tokens)[id]] = id;
    }
  }
  Json pairs = Json::array();
  for (const std::string& merge : *merges) {
    const size_t space = merge.find(' ', 1);
    if (space == std::string::npos || space + 1 == merge.size()) {
      return bad(file, "merge " + std::to_string(pairs.size()) + " of the tokenizer is no pair");
    }
    pairs.push_back({merge.substr(0, space), merge.substr(space + 1)});
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", false}};
  Json whole = {
      {"version", "1.0"},
      {"added_tokens", std::move(added)},
      {"normalizer", pattern->nfc ? Json{{"type", "NFC"}} : Json()},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"pattern", {{"Regex", pattern->split}}},
           {"behavior", "Isolated"},
           {"invert", false}},
          byte_level}}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"},
        {"ignore_merges", pattern->ignore_merges},
        {"vocab", std::move(vocab)},
        {"merges", std::move(pairs)}}},
  };
  bool begins = pattern->begins;
  if (const auto found = file.metadata().find("tokenizer.ggml.add_bos_token");
      found != file.metadata().end()) {
    const bool* said = std::get_if<bool>(&found->second);
    if (said == nullptr) return bad(file, "\"tokenizer.ggml.add_bos_token\" is no truth value");
    begins = *said;
  }
  CLO_ASSIGN(const auto bos, token_of(file, "tokenizer.ggml.bos_token_id", *tokens));
  if (begins && bos) {
    CLO_ASSIGN(const int64_t id, file.integer("tokenizer.ggml.bos_token_id"));
    whole["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", *bos}, {"type_id", 0}}}},
          {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", Json::array()},
        {"special_tokens", {{*bos, {{"id", *bos}, {"ids", {id}}, {"tokens", {*bos}}}}}}};
  }
  try {
    return whole.dump();
  } catch (const Json::exception&) {  // a token that is not UTF-8
    return bad(file, "holds tokens that are not UTF-8");
  }
}

bool gguf_has_tokenizer(const GgufFile& file) { return has(file, "tokenizer.ggml.model"); }

Result<TokenizerConfig> gguf_tokenizer_config(const GgufFile& file) {
  TokenizerConfig config;
  if (!gguf_has_tokenizer(file)) return config;
  CLO_ASSIGN(const auto* const tokens, list<std::string>(file, "tokenizer.ggml.tokens"));
  for (const auto& [name, key] : {std::pair{"bos_token", "tokenizer.ggml.bos_token_id"},
                                  std::pair{"eos_token", "tokenizer.ggml.eos_token_id"},
                                  std::pair{"unk_token", "tokenizer.ggml.unknown_token_id"},
                                  std::pair{"pad_token", "tokenizer.ggml.padding_token_id"}}) {
    CLO_ASSIGN(const auto token, token_of(file, key, *tokens));
    if (token) config.special_tokens[name] = *token;
  }
  if (has(file, "tokenizer.chat_template")) {
    CLO_ASSIGN(config.chat_template, file.text("tokenizer.chat_template"));
    config.chat_template_where = file.where() + " tokenizer.chat_template";
  }
  return config;
}

}  // namespace clo
