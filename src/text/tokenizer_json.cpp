// Reads a Hugging Face tokenizer.json into TokenizerParts. Every object of the file either changes
// the result in a way that is implemented, or is known not to, or is refused by name.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/try.h"
#include "base/utf8.h"
#include "text/byte_level.h"
#include "text/tokenizer_config.h"
#include "text/tokenizer_parts.h"

namespace clo {

namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxId = 1 << 24;
// Ids may have gaps, but a table indexed by id must not be much larger than the file.
constexpr int64_t kMaxUnusedIds = 1 << 20;
constexpr size_t kMaxAddedTokenBytes = 1024;
constexpr int kMaxSequenceDepth = 8;
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class Reader {
 public:
  Reader(const Json& root, const std::string& where) : root_(root), where_(where) {}

  Result<std::unique_ptr<TokenizerParts>> run() {
    CLO_TRY(read_model(member(root_, "model")));
    CLO_TRY(read_added_tokens(member(root_, "added_tokens")));
    CLO_TRY(check_ids());
    CLO_TRY(read_normalizer(member(root_, "normalizer"), 0));
    CLO_TRY(read_pre_tokenizer(member(root_, "pre_tokenizer"), 0));
    if (!byte_level_seen_)
      return unsupported("a pre-tokenizer without ByteLevel", "only byte-level BPE is");
    CLO_TRY(read_post_processor(member(root_, "post_processor"), 0));
    CLO_TRY(read_decoder(member(root_, "decoder"), 0));
    if (!byte_level_decoder_) return unsupported("a decoder without ByteLevel", "ByteLevel is");
    CLO_TRY(build_finders());
    return std::move(parts_);
  }

 private:
  static const Json& member(const Json& object, const char* key) {
    static const Json kNull;
    if (!object.is_object()) return kNull;
    const auto found = object.find(key);
    return found == object.end() ? kNull : *found;
  }
  Error bad(const std::string& message) const {
    return Error{ErrorCode::kBadFile, message, where_};
  }
  Error unsupported(const std::string& what, const std::string& instead) const {
    return Error{ErrorCode::kUnsupported, what + " is not supported; " + instead, where_};
  }
  static std::string shown(const Json& value) {
    std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (text.size() > 80) {
      size_t cut = 77;
      while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
      text = text.substr(0, cut) + "...";
    }
    return text;
  }

  Result<bool> flag(const Json& object, const char* key, bool otherwise) const {
    const Json& value = member(object, key);
    if (value.is_null()) return otherwise;
    if (!value.is_boolean())
      return bad(std::string("\"") + key + "\": expected true or false, found " + shown(value));
    return value.get<bool>();
  }
  Result<std::string> type_of(const Json& object, const char* part) const {
    const Json& type = member(object, "type");
    if (!type.is_string())
      return bad(std::string(part) + ": expected an object with a \"type\", found " +
                 shown(object));
    return type.get<std::string>();
  }
  Result<int32_t> id_of(const Json& value, const std::string& token) const {
    const bool good = value.is_number_integer() && value.is_number_unsigned() &&
                      value.get<uint64_t>() < static_cast<uint64_t>(kMaxId);
    if (!good) {
      return bad("the id of token \"" + token + "\": expected an integer from 0 to " +
                 std::to_string(kMaxId - 1) + ", found " + shown(value));
    }
    return value.get<int32_t>();
  }
  // The list of a Sequence, with its nesting bounded.
  Result<const Json*> list(const Json& object, const char* key, int depth) const {
    const Json& items = member(object, key);
    if (!items.is_array())
      return bad(std::string("a Sequence needs a list \"") + key + "\", found " + shown(items));
    if (depth >= kMaxSequenceDepth)
      return unsupported("a Sequence nested deeper than 8", "a flat list is");
    return &items;
  }

  Status add_token(const std::string& spelling, int32_t id, std::string bytes) {
    const auto index = static_cast<size_t>(id);
    if (index >= parts_->tokens.size()) parts_->tokens.resize(index + 1);
    if (parts_->tokens[index].present)
      return bad("id " + std::to_string(id) + " is given to two tokens, one of them \"" + spelling +
                 "\"");
    if (!parts_->ids.emplace(spelling, id).second)
      return bad("token \"" + spelling + "\" has two ids");
    parts_->tokens[index] = {std::move(bytes), true, false};
    return Ok{};
  }

  Status read_model(const Json& model) {
    if (!model.is_object()) return bad("no \"model\" object: this is not a tokenizer.json");
    const Json& type = member(model, "type");
    // Files older than the "type" field are BPE exactly when they have merges.
    const bool is_bpe = type == "BPE" || (type.is_null() && model.contains("merges"));
    if (!is_bpe)
      return unsupported("a tokenizer model of type " + shown(type), "byte-level \"BPE\" is");
    const Json& dropout = member(model, "dropout");
    if (!dropout.is_null() && dropout != 0.0)
      return unsupported("BPE dropout " + shown(dropout), "null is");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& affix = member(model, key);
      if (!affix.is_null() && affix != "")
        return unsupported(std::string("BPE ") + key + " " + shown(affix), "null is");
    }
    CLO_ASSIGN(parts_->ignore_merges, flag(model, "ignore_merges", false));

    const Json& vocab = member(model, "vocab");
    if (!vocab.is_object()) return bad("model.vocab: expected an object, found " + shown(vocab));
    int32_t largest = -1;
    for (const auto& [token, id_value] : vocab.items()) {
      CLO_ASSIGN(const int32_t id, id_of(id_value, token));
      largest = std::max(largest, id);
    }
    CLO_TRY(check_spread(largest, vocab.size()));
    for (const auto& [token, id_value] : vocab.items()) {
      // Tokens outside the byte alphabet stand for their own characters, as in the reference.
      CLO_TRY(add_token(token, id_value.get<int32_t>(), unspell_bytes(token).value_or(token)));
    }
    CLO_TRY(read_byte_tokens(model));
    return read_merges(member(model, "merges"));
  }

  // A byte without a token is dropped, as the library does where there is no unk_token. With one it
  // would matter, and so would fuse_unk and byte_fallback.
  Status read_byte_tokens(const Json& model) {
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

  Status read_merges(const Json& merges) {
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
  Error bad_merge(size_t index, const Json& merge, const std::string& why) const {
    return bad("model.merges[" + std::to_string(index) + "] " + shown(merge) + ": " + why);
  }

  Status read_added_tokens(const Json& list_value) {
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

  Status check_spread(int64_t largest, size_t count) const {
    if (largest < static_cast<int64_t>(count) + kMaxUnusedIds) return Ok{};
    return bad("the largest token id is " + std::to_string(largest) + ", but there are only " +
               std::to_string(count) + " tokens");
  }
  Status check_ids() const {
    if (parts_->ids.empty()) return bad("the vocabulary is empty");
    return Ok{};
  }

  Status read_normalizer(const Json& value, int depth) {
    if (value.is_null()) return Ok{};
    CLO_ASSIGN(const std::string type, type_of(value, "normalizer"));
    if (type == "Sequence") {
      CLO_ASSIGN(const Json* items, list(value, "normalizers", depth));
      for (const Json& item : *items) CLO_TRY(read_normalizer(item, depth + 1));
      return Ok{};
    }
    for (const NormalForm form :
         {NormalForm::kNfc, NormalForm::kNfd, NormalForm::kNfkc, NormalForm::kNfkd}) {
      if (type == normal_form_name(form)) {
        parts_->normal_forms.push_back(form);
        return Ok{};
      }
    }
    return unsupported("a normalizer of type \"" + type + "\"", "NFC, NFD, NFKC and NFKD are");
  }

  Status add_split(Result<SplitPattern> pattern) {
    CLO_ASSIGN(SplitPattern split, std::move(pattern));
    parts_->splits.push_back(std::move(split));
    return Ok{};
  }

  Status read_pre_tokenizer(const Json& value, int depth) {
    if (value.is_null()) return Ok{};
    CLO_ASSIGN(const std::string type, type_of(value, "pre_tokenizer"));
    if (type == "Sequence") {
      CLO_ASSIGN(const Json* items, list(value, "pretokenizers", depth));
      for (const Json& item : *items) CLO_TRY(read_pre_tokenizer(item, depth + 1));
      return Ok{};
    }
    // After ByteLevel the text is in its alphabet, where other pre-tokenizers would see letters.
    if (byte_level_seen_)
      return unsupported("a pre-tokenizer of type \"" + type + "\" after ByteLevel",
                         "ByteLevel comes last");
    if (type == "ByteLevel") {
      byte_level_seen_ = true;
      CLO_ASSIGN(parts_->add_prefix_space, flag(value, "add_prefix_space", true));
      CLO_ASSIGN(const bool use_regex, flag(value, "use_regex", true));
      parts_->splits_before_prefix_space = parts_->splits.size();
      if (use_regex) return add_split(SplitPattern::compile(kGpt2Pattern, where_));
      return Ok{};
    }
    if (type == "Digits") {
      CLO_ASSIGN(const bool individual, flag(value, "individual_digits", false));
      return add_split(SplitPattern::compile(individual ? "\\p{N}" : "\\p{N}+", where_));
    }
    if (type != "Split") {
      return unsupported("a pre-tokenizer of type \"" + type + "\"",
                         "Split, Digits, ByteLevel and Sequences of them are");
    }
    // With "Isolated" matches and gaps are kept alike, so "invert" changes nothing.
    const Json& behavior = member(value, "behavior");
    if (behavior != "Isolated")
      return unsupported("a Split of behavior " + shown(behavior), "\"Isolated\" is");
    const Json& pattern = member(value, "pattern");
    const Json& regex = member(pattern, "Regex");
    const Json& text = member(pattern, "String");
    if (regex.is_string())
      return add_split(SplitPattern::compile(regex.get_ref<const std::string&>(), where_));
    if (text.is_string())
      return add_split(SplitPattern::literal(text.get_ref<const std::string&>(), where_));
    return bad("a Split pattern: expected {\"Regex\": ...} or {\"String\": ...}, found " +
               shown(pattern));
  }

  Status read_post_processor(const Json& value, int depth) {
    if (value.is_null()) return Ok{};
    CLO_ASSIGN(const std::string type, type_of(value, "post_processor"));
    if (type == "Sequence") {
      CLO_ASSIGN(const Json* items, list(value, "processors", depth));
      for (const Json& item : *items) CLO_TRY(read_post_processor(item, depth + 1));
      return Ok{};
    }
    if (type != "ByteLevel" && type != "TemplateProcessing") {
      return unsupported("a post-processor of type \"" + type + "\"",
                         "ByteLevel, TemplateProcessing and Sequences of them are");
    }
    parts_->post_processor =
        (parts_->post_processor == "none" ? "" : parts_->post_processor + " then ") + type;
    if (type == "ByteLevel") return Ok{};  // it only moves offsets

    std::vector<int32_t> before, after;
    bool text_seen = false;
    const Json& single = member(value, "single");
    if (!single.is_array())
      return bad("TemplateProcessing: expected a list \"single\", found " + shown(single));
    for (const Json& piece : single) {
      const Json& special = member(piece, "SpecialToken");
      if (special.is_null()) {
        if (text_seen || member(member(piece, "Sequence"), "id") != "A")
          return bad("TemplateProcessing: expected special tokens and one Sequence \"A\", found " +
                     shown(piece));
        text_seen = true;
        continue;
      }
      CLO_TRY(append_special(special, value, text_seen ? after : before));
    }
    if (!text_seen) return bad("TemplateProcessing: \"single\" has no Sequence \"A\"");
    parts_->prefix.insert(parts_->prefix.begin(), before.begin(), before.end());
    parts_->suffix.insert(parts_->suffix.end(), after.begin(), after.end());
    return Ok{};
  }

  Status append_special(const Json& special, const Json& processor, std::vector<int32_t>& ids) {
    const Json& name = member(special, "id");
    if (!name.is_string())
      return bad("TemplateProcessing: a SpecialToken needs an \"id\", found " + shown(special));
    const auto& text = name.get_ref<const std::string&>();
    const Json& listed = member(member(member(processor, "special_tokens"), text.c_str()), "ids");
    if (!listed.is_array())
      return bad("TemplateProcessing: special_tokens has no ids for \"" + text + "\"");
    for (const Json& value : listed) {
      CLO_ASSIGN(const int32_t id, id_of(value, text));
      if (!parts_->contains(id))
        return bad("TemplateProcessing: id " + std::to_string(id) + " of \"" + text +
                   "\" is not in the vocabulary");
      ids.push_back(id);
    }
    return Ok{};
  }

  Status read_decoder(const Json& value, int depth) {
    if (value.is_null()) return Ok{};
    CLO_ASSIGN(const std::string type, type_of(value, "decoder"));
    if (type == "Sequence") {
      CLO_ASSIGN(const Json* items, list(value, "decoders", depth));
      for (const Json& item : *items) CLO_TRY(read_decoder(item, depth + 1));
      return Ok{};
    }
    if (type == "ByteLevel") {
      byte_level_decoder_ = true;
    } else if (type != "Fuse") {  // Fuse only joins the pieces
      return unsupported("a decoder of type \"" + type + "\"", "ByteLevel is");
    }
    return Ok{};
  }

  Status build_finders() {
    for (const AddedToken& token : parts_->added) {
      if (!token.normalized) {
        parts_->raw_finder.add(token.content, token);
        continue;
      }
      std::string pattern = token.content;
      for (const NormalForm form : parts_->normal_forms) {
        CLO_ASSIGN(pattern, normalize(form, pattern));
      }
      parts_->normal_finder.add(pattern, token);
    }
    return Ok{};
  }

  const Json& root_;
  const std::string& where_;
  std::unique_ptr<TokenizerParts> parts_ = std::make_unique<TokenizerParts>();
  bool byte_level_seen_ = false;
  bool byte_level_decoder_ = false;
};

}  // namespace

Result<std::unique_ptr<TokenizerParts>> read_tokenizer_json(std::string_view text,
                                                            const std::string& where) {
  Json root;
  try {
    root = Json::parse(text);
  } catch (const Json::exception& fault) {
    return Error{ErrorCode::kBadFile,
                 "is not valid JSON" + explain_not_json(std::string(text.substr(0, 256))) + ": " +
                     fault.what(),
                 where};
  }
  return Reader(root, where).run();
}

}  // namespace clo
