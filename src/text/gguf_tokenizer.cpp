#include "text/gguf_tokenizer.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "base/try.h"
#include "text/gguf_values.h"

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

// A token of the vocabulary by the metadata that names its id; nothing where there is none.
Result<std::optional<std::string>> token_of(const GgufFile& file, const std::string& key,
                                            const std::vector<std::string>& tokens) {
  CLO_ASSIGN(const auto id, gguf_token_id(file, key, tokens.size()));
  if (!id) return std::optional<std::string>();
  return std::optional(tokens[static_cast<size_t>(*id)]);
}

Result<const Pattern*> pattern_of(const GgufFile& file) {
  std::string name = "default";
  if (gguf_has(file, "tokenizer.ggml.pre")) {
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

Result<bool> gguf_flag(const GgufFile& file, const std::string& key, bool otherwise) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end()) return otherwise;
  const bool* said = std::get_if<bool>(&found->second);
  if (said == nullptr) return bad_gguf(file, "metadata \"" + key + "\" is no truth value");
  return *said;
}

Result<std::optional<int32_t>> gguf_token_id(const GgufFile& file, const std::string& key,
                                             size_t num_tokens) {
  if (!gguf_has(file, key)) return std::optional<int32_t>();
  CLO_ASSIGN(const int64_t id, file.integer(key));
  if (id < 0 || id >= static_cast<int64_t>(num_tokens)) {
    return bad_gguf(file, "metadata \"" + key + "\" is " + std::to_string(id) +
                              ", the vocabulary has " + std::to_string(num_tokens) + " tokens");
  }
  return std::optional(static_cast<int32_t>(id));
}

Result<std::string> gguf_tokenizer_json(const GgufFile& file) {
  CLO_ASSIGN(const std::string kind, file.text("tokenizer.ggml.model"));
  if (kind != "gpt2") {
    return Error{ErrorCode::kUnsupported,
                 "\"tokenizer.ggml.model\" is \"" + kind +
                     "\"; supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)",
                 file.where()};
  }
  CLO_ASSIGN(const Pattern* const pattern, pattern_of(file));
  CLO_ASSIGN(const auto* const tokens, gguf_list<std::string>(file, "tokenizer.ggml.tokens"));
  CLO_ASSIGN(const auto* const merges, gguf_list<std::string>(file, "tokenizer.ggml.merges"));
  CLO_ASSIGN(const auto* const types, gguf_list<int64_t>(file, "tokenizer.ggml.token_type"));
  if (types->size() != tokens->size()) {
    return bad_gguf(file, "has " + std::to_string(tokens->size()) + " tokens and " +
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
      return bad_gguf(file,
                      "merge " + std::to_string(pairs.size()) + " of the tokenizer is no pair");
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
  CLO_ASSIGN(const bool begins, gguf_flag(file, "tokenizer.ggml.add_bos_token", pattern->begins));
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
    return bad_gguf(file, "holds tokens that are not UTF-8");
  }
}

bool gguf_has_tokenizer(const GgufFile& file) { return gguf_has(file, "tokenizer.ggml.model"); }

Result<TokenizerConfig> gguf_tokenizer_config(const GgufFile& file) {
  TokenizerConfig config;
  if (!gguf_has_tokenizer(file)) return config;
  CLO_ASSIGN(const auto* const tokens, gguf_list<std::string>(file, "tokenizer.ggml.tokens"));
  for (const auto& [name, key] : {std::pair{"bos_token", "tokenizer.ggml.bos_token_id"},
                                  std::pair{"eos_token", "tokenizer.ggml.eos_token_id"},
                                  std::pair{"unk_token", "tokenizer.ggml.unknown_token_id"},
                                  std::pair{"pad_token", "tokenizer.ggml.padding_token_id"}}) {
    CLO_ASSIGN(const auto token, token_of(file, key, *tokens));
    if (token) config.special_tokens[name] = *token;
  }
  if (gguf_has(file, "tokenizer.chat_template")) {
    CLO_ASSIGN(config.chat_template, file.text("tokenizer.chat_template"));
    config.chat_template_where = file.where() + " tokenizer.chat_template";
  }
  return config;
}

}  // namespace clo
