// Reads a Hugging Face tokenizer.json into TokenizerParts: its vocabulary, merges and added tokens.
#include <algorithm>

#include "base/try.h"
#include "text/byte_level.h"
#include "text/tokenizer_config.h"
#include "text/tokenizer_json_reader.h"

namespace clo {

namespace {

constexpr int64_t kMaxId = 1 << 24;
// Ids may have gaps, but a table indexed by id must not be much larger than the file.
constexpr int64_t kMaxUnusedIds = 1 << 20;
constexpr size_t kMaxAddedTokenBytes = 1024;
constexpr int kMaxSequenceDepth = 8;

// Whether a ByteLevel stands anywhere among pre-tokenizers. What a token spells depends on it, so
// it must be known before the vocabulary is read.
bool has_byte_level(const nlohmann::json& value, int depth) {
  if (!value.is_object() || depth > kMaxSequenceDepth) return false;
  if (const auto type = value.find("type"); type != value.end() && *type == "ByteLevel")
    return true;
  const auto items = value.find("pretokenizers");
  if (items == value.end() || !items->is_array()) return false;
  return std::any_of(items->begin(), items->end(),
                     [&](const auto& item) { return has_byte_level(item, depth + 1); });
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// "<0x0A>", as byte_fallback spells a byte.
std::string spelling_of_byte(int byte) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  return std::string("<0x") + kDigits[byte >> 4] + kDigits[byte & 15] + ">";
}

}  // namespace

int byte_of_spelling(std::string_view spelling) {
  if (spelling.size() != 6 || !spelling.starts_with("<0x") || spelling[5] != '>') return -1;
  const int high = hex_digit(spelling[3]), low = hex_digit(spelling[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

Status build_finders(TokenizerParts& parts) {
  for (const AddedToken& token : parts.added) {
    if (!token.normalized) {
      parts.raw_finder.add(token.content, token);
      continue;
    }
    std::string pattern = token.content;
    for (const NormalizerStep& step : parts.normalizer) {
      CLO_ASSIGN(pattern, apply_step(step, pattern));
    }
    parts.normal_finder.add(pattern, token);
  }
  return Ok{};
}

Result<std::unique_ptr<TokenizerParts>> TokenizerJsonReader::run() {
  const Json& pre_tokenizer = member(root_, "pre_tokenizer");
  parts_->kind = has_byte_level(pre_tokenizer, 0) ? TokenizerParts::Kind::kByteLevel
                                                  : TokenizerParts::Kind::kCharacters;
  const bool byte_level = parts_->kind == TokenizerParts::Kind::kByteLevel;
  CLO_TRY(read_model(member(root_, "model")));
  CLO_TRY(read_added_tokens(member(root_, "added_tokens")));
  if (parts_->ids.empty()) return bad("the vocabulary is empty");
  CLO_TRY(read_normalizer(member(root_, "normalizer"), 0));
  CLO_TRY(read_pre_tokenizer(pre_tokenizer, 0));
  CLO_TRY(read_post_processor(member(root_, "post_processor"), 0));
  const Json& decoder = member(root_, "decoder");
  CLO_TRY(read_decoder(decoder, 0));
  if (byte_level && !byte_level_decoder_)
    return unsupported("a ByteLevel pre-tokenizer with a decoder that has no ByteLevel",
                       "a ByteLevel decoder is");
  // Without a decoder the library puts a space between any two tokens.
  if (!byte_level && decoder.is_null())
    return unsupported("a tokenizer without a decoder",
                       "Replace, ByteFallback, Fuse and Strip are");
  if (!byte_level) decode_tokens();
  CLO_TRY(build_finders(*parts_));
  return std::move(parts_);
}

const TokenizerJsonReader::Json& TokenizerJsonReader::member(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

Error TokenizerJsonReader::bad(const std::string& message) const {
  return Error{ErrorCode::kBadFile, message, where_};
}

Error TokenizerJsonReader::unsupported(const std::string& what, const std::string& instead) const {
  return Error{ErrorCode::kUnsupported, what + " is not supported; " + instead, where_};
}

std::string TokenizerJsonReader::shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) {
    size_t cut = 77;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
    text = text.substr(0, cut) + "...";
  }
  return text;
}

Result<bool> TokenizerJsonReader::flag(const Json& object, const char* key, bool otherwise) const {
  const Json& value = member(object, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean())
    return bad(std::string("\"") + key + "\": expected true or false, found " + shown(value));
  return value.get<bool>();
}

Result<std::string> TokenizerJsonReader::type_of(const Json& object, const char* part) const {
  const Json& type = member(object, "type");
  if (!type.is_string())
    return bad(std::string(part) + ": expected an object with a \"type\", found " + shown(object));
  return type.get<std::string>();
}

Result<int32_t> TokenizerJsonReader::id_of(const Json& value, const std::string& token) const {
  const bool good = value.is_number_integer() && value.is_number_unsigned() &&
                    value.get<uint64_t>() < static_cast<uint64_t>(kMaxId);
  if (!good) {
    return bad("the id of token \"" + token + "\": expected an integer from 0 to " +
               std::to_string(kMaxId - 1) + ", found " + shown(value));
  }
  return value.get<int32_t>();
}

Result<std::string> TokenizerJsonReader::text_of(const Json& object, const char* key,
                                                 const char* part) const {
  const Json& value = member(object, key);
  if (!value.is_string() || value.get_ref<const std::string&>().empty())
    return bad(std::string(part) + ": expected a text \"" + key + "\", found " + shown(value));
  return value.get<std::string>();
}

Result<const TokenizerJsonReader::Json*> TokenizerJsonReader::list(const Json& object,
                                                                   const char* key,
                                                                   int depth) const {
  const Json& items = member(object, key);
  if (!items.is_array())
    return bad(std::string("a Sequence needs a list \"") + key + "\", found " + shown(items));
  if (depth >= kMaxSequenceDepth)
    return unsupported("a Sequence nested deeper than 8", "a flat list is");
  return &items;
}

Status TokenizerJsonReader::add_token(const std::string& spelling, int32_t id, std::string bytes) {
  const auto index = static_cast<size_t>(id);
  if (index >= parts_->tokens.size()) parts_->tokens.resize(index + 1);
  if (parts_->tokens[index].present)
    return bad("id " + std::to_string(id) + " is given to two tokens, one of them \"" + spelling +
               "\"");
  if (!parts_->ids.emplace(spelling, id).second)
    return bad("token \"" + spelling + "\" has two ids");
  parts_->tokens[index].bytes = std::move(bytes);
  parts_->tokens[index].present = true;
  return Ok{};
}

Status TokenizerJsonReader::read_model(const Json& model) {
  if (!model.is_object()) return bad("no \"model\" object: this is not a tokenizer.json");
  const Json& type = member(model, "type");
  // Files older than the "type" field are BPE exactly when they have merges.
  const bool is_bpe = type == "BPE" || (type.is_null() && model.contains("merges"));
  if (!is_bpe) return unsupported("a tokenizer model of type " + shown(type), "\"BPE\" is");
  const Json& dropout = member(model, "dropout");
  if (!dropout.is_null() && dropout != 0.0)
    return unsupported("BPE dropout " + shown(dropout), "null is");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& affix = member(model, key);
    if (!affix.is_null() && affix != "")
      return unsupported(std::string("BPE ") + key + " " + shown(affix), "null is");
  }
  CLO_ASSIGN(parts_->ignore_merges, flag(model, "ignore_merges", false));

  const bool byte_level = parts_->kind == TokenizerParts::Kind::kByteLevel;
  const Json& vocab = member(model, "vocab");
  if (!vocab.is_object()) return bad("model.vocab: expected an object, found " + shown(vocab));
  int32_t largest = -1;
  for (const auto& [token, id_value] : vocab.items()) {
    CLO_ASSIGN(const int32_t id, id_of(id_value, token));
    largest = std::max(largest, id);
  }
  CLO_TRY(check_spread(largest, vocab.size()));
  for (const auto& [token, id_value] : vocab.items()) {
    const auto id = id_value.get<int32_t>();
    // Tokens outside the byte alphabet stand for their own characters, as in the reference.
    CLO_TRY(add_token(token, id, byte_level ? unspell_bytes(token).value_or(token) : token));
    parts_->tokens[static_cast<size_t>(id)].in_model = true;
  }
  CLO_TRY(byte_level ? read_byte_tokens(model) : read_character_rules(model));
  return read_merges(member(model, "merges"));
}

// A byte without a token is dropped, as the library does where there is no unk_token. With one it
// would matter, and so would fuse_unk and byte_fallback.
Status TokenizerJsonReader::read_byte_tokens(const Json& model) {
  BpeMerger::ByteTokens byte_tokens;
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = parts_->ids.find(spell_bytes(std::string(1, static_cast<char>(byte))));
    byte_tokens[static_cast<size_t>(byte)] = found == parts_->ids.end() ? -1 : found->second;
    const bool in_utf8 = byte < 0xC0 || (byte >= 0xC2 && byte <= 0xF4);
    if (found == parts_->ids.end() && in_utf8) {
      const Json& unk = member(model, "unk_token");
      if (!unk.is_null()) {
        return unsupported("a vocabulary without a token for byte " + std::to_string(byte) +
                               " (unk_token " + shown(unk) + ")",
                           "one that covers all bytes is");
      }
      ++parts_->num_dropped_bytes;
    }
  }
  parts_->bpe.set_byte_tokens(byte_tokens);
  return Ok{};
}

// What becomes of characters that are no tokens.
Status TokenizerJsonReader::read_character_rules(const Json& model) {
  CLO_ASSIGN(parts_->byte_fallback, flag(model, "byte_fallback", false));
  CLO_ASSIGN(parts_->fuse_unknown, flag(model, "fuse_unk", false));
  const Json& unk = member(model, "unk_token");
  if (!unk.is_null()) {
    const auto found =
        unk.is_string() ? parts_->ids.find(unk.get_ref<const std::string&>()) : parts_->ids.end();
    if (found == parts_->ids.end())
      return bad("model.unk_token: expected a token of model.vocab or null, found " + shown(unk));
    parts_->unknown = found->second;
  }
  if (!parts_->byte_fallback) return Ok{};
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = parts_->ids.find(spelling_of_byte(byte));
    const bool in_utf8 = byte < 0xC0 || (byte >= 0xC2 && byte <= 0xF4);
    if (found == parts_->ids.end() && in_utf8)
      return unsupported("byte_fallback without a token \"" + spelling_of_byte(byte) + "\"",
                         "a vocabulary with a token for each byte is");
    parts_->fallback_tokens[static_cast<size_t>(byte)] =
        found == parts_->ids.end() ? -1 : found->second;
  }
  return Ok{};
}

Status TokenizerJsonReader::read_merges(const Json& merges) {
  if (!merges.is_array()) return bad("model.merges: expected a list, found " + shown(merges));
  parts_->bpe.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const Json& merge = merges[i];
    std::string left, right;
    if (merge.is_string()) {
      const auto& line = merge.get_ref<const std::string&>();
      if (line.starts_with("#version")) continue;
      const size_t space = line.find(' ');
      if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos)
        return bad_merge(i, merge, "expected two tokens and one space");
      left = line.substr(0, space);
      right = line.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else {
      return bad_merge(i, merge, "expected \"a b\" or [\"a\", \"b\"]");
    }
    const auto a = parts_->ids.find(left), b = parts_->ids.find(right),
               merged = parts_->ids.find(left + right), none = parts_->ids.end();
    if (a == none || b == none || merged == none)
      return bad_merge(i, merge, "a part or the result is not in model.vocab");
    if (!parts_->bpe.add_merge(a->second, b->second, merged->second))
      return bad_merge(i, merge, "the pair occurs twice");
  }
  return Ok{};
}

Error TokenizerJsonReader::bad_merge(size_t index, const Json& merge,
                                     const std::string& why) const {
  return bad("model.merges[" + std::to_string(index) + "] " + shown(merge) + ": " + why);
}

Status TokenizerJsonReader::read_added_tokens(const Json& list_value) {
  if (list_value.is_null()) return Ok{};
  if (!list_value.is_array())
    return bad("added_tokens: expected a list, found " + shown(list_value));
  int32_t largest = -1;
  for (const Json& entry : list_value) {
    const Json& content = member(entry, "content");
    if (!content.is_string() || content.get_ref<const std::string&>().empty() ||
        content.get_ref<const std::string&>().size() > kMaxAddedTokenBytes) {
      return bad("added_tokens: expected a \"content\" of 1 to " +
                 std::to_string(kMaxAddedTokenBytes) + " bytes, found " + shown(entry));
    }
    AddedToken token;
    token.content = content.get<std::string>();
    CLO_ASSIGN(token.id, id_of(member(entry, "id"), token.content));
    CLO_ASSIGN(token.single_word, flag(entry, "single_word", false));
    CLO_ASSIGN(token.lstrip, flag(entry, "lstrip", false));
    CLO_ASSIGN(token.rstrip, flag(entry, "rstrip", false));
    CLO_ASSIGN(token.special, flag(entry, "special", false));
    CLO_ASSIGN(token.normalized, flag(entry, "normalized", !token.special));
    largest = std::max(largest, token.id);
    parts_->added.push_back(std::move(token));
  }
  CLO_TRY(check_spread(largest, parts_->added.size() + parts_->ids.size()));
  std::vector<bool> taken(static_cast<size_t>(largest + 1));
  for (const AddedToken& token : parts_->added) {
    const auto index = static_cast<size_t>(token.id);
    const auto known = parts_->ids.find(token.content);
    if (taken[index] || (known != parts_->ids.end() && known->second != token.id))
      return bad("added token \"" + token.content + "\" with id " + std::to_string(token.id) +
                 ": the token or the id occurs elsewhere too");
    taken[index] = true;
    if (known == parts_->ids.end()) CLO_TRY(add_token(token.content, token.id, token.content));
    // Added tokens stand for their content even where it happens to spell other bytes.
    parts_->tokens[index].bytes = token.content;
    parts_->tokens[index].special = token.special;
  }
  return Ok{};
}

Status TokenizerJsonReader::check_spread(int64_t largest, size_t count) const {
  if (largest < static_cast<int64_t>(count) + kMaxUnusedIds) return Ok{};
  return bad("the largest token id is " + std::to_string(largest) + ", but there are only " +
             std::to_string(count) + " tokens");
}

Result<std::unique_ptr<TokenizerParts>> read_tokenizer_json(std::string_view text,
                                                            const std::string& where) {
  nlohmann::json root;
  try {
    root = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& fault) {
    return Error{ErrorCode::kBadFile,
                 "is not valid JSON" + explain_not_json(std::string(text.substr(0, 256))) + ": " +
                     fault.what(),
                 where};
  }
  return TokenizerJsonReader(root, where).run();
}

}  // namespace clo
