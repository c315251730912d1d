// Normaliser, pre-tokenizer, post-processor and decoder of a tokenizer.json.
#include "base/try.h"
#include "base/utf8.h"
#include "text/tokenizer_json_reader.h"

namespace clo {

namespace {

constexpr int64_t kMaxStrip = 16;
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

Result<std::pair<std::string, std::string>> TokenizerJsonReader::read_replace(
    const Json& value, const char* part) const {
  const Json& pattern = member(value, "pattern");
  if (!member(pattern, "Regex").is_null())
    return unsupported(std::string("a Replace ") + part + " with a regular expression",
                       "one of a literal {\"String\": ...} is");
  CLO_ASSIGN(std::string text, text_of(pattern, "String", "the pattern of a Replace"));
  CLO_ASSIGN(std::string content, text_of(value, "content", "a Replace"));
  return std::pair(std::move(text), std::move(content));
}

Status TokenizerJsonReader::read_normalizer(const Json& value, int depth) {
  if (value.is_null()) return Ok{};
  CLO_ASSIGN(const std::string type, type_of(value, "normalizer"));
  if (type == "Sequence") {
    CLO_ASSIGN(const Json* items, list(value, "normalizers", depth));
    for (const Json& item : *items) CLO_TRY(read_normalizer(item, depth + 1));
    return Ok{};
  }
  NormalizerStep step;
  if (type == "Prepend") {
    step.kind = NormalizerStep::Kind::kPrepend;
    CLO_ASSIGN(step.content, text_of(value, "prepend", "a Prepend normalizer"));
    parts_->normalizer.push_back(std::move(step));
    return Ok{};
  }
  if (type == "Replace") {
    step.kind = NormalizerStep::Kind::kReplace;
    CLO_ASSIGN(auto texts, read_replace(value, "normalizer"));
    step.pattern = std::move(texts.first);
    step.content = std::move(texts.second);
    parts_->normalizer.push_back(std::move(step));
    return Ok{};
  }
  for (const NormalForm form :
       {NormalForm::kNfc, NormalForm::kNfd, NormalForm::kNfkc, NormalForm::kNfkd}) {
    if (type == normal_form_name(form)) {
      step.form = form;
      parts_->normalizer.push_back(std::move(step));
      return Ok{};
    }
  }
  return unsupported("a normalizer of type \"" + type + "\"",
                     "Prepend, Replace, NFC, NFD, NFKC and NFKD are");
}

Status TokenizerJsonReader::add_split(Result<SplitPattern> pattern) {
  CLO_ASSIGN(SplitPattern split, std::move(pattern));
  parts_->splits.push_back(std::move(split));
  return Ok{};
}

Status TokenizerJsonReader::read_pre_tokenizer(const Json& value, int depth) {
  if (value.is_null()) return Ok{};
  CLO_ASSIGN(const std::string type, type_of(value, "pre_tokenizer"));
  if (type == "Sequence") {
    CLO_ASSIGN(const Json* items, list(value, "pretokenizers", depth));
    for (const Json& item : *items) CLO_TRY(read_pre_tokenizer(item, depth + 1));
    return Ok{};
  }
  // After ByteLevel the text is in its alphabet, where other pre-tokenizers would see letters, and
  // after Metaspace its spaces are gone.
  if (byte_level_seen_ || parts_->metaspace) {
    const std::string last = byte_level_seen_ ? "ByteLevel" : "Metaspace";
    return unsupported("a pre-tokenizer of type \"" + type + "\" after " + last,
                       last + " comes last");
  }
  if (type == "ByteLevel") {
    byte_level_seen_ = true;
    CLO_ASSIGN(parts_->add_prefix_space, flag(value, "add_prefix_space", true));
    CLO_ASSIGN(const bool use_regex, flag(value, "use_regex", true));
    parts_->splits_before_prefix_space = parts_->splits.size();
    if (use_regex) return add_split(SplitPattern::compile(kGpt2Pattern, where_));
    return Ok{};
  }
  if (type == "Metaspace") return read_metaspace(value);
  if (type == "Digits") {
    CLO_ASSIGN(const bool individual, flag(value, "individual_digits", false));
    return add_split(SplitPattern::compile(individual ? "\\p{N}" : "\\p{N}+", where_));
  }
  if (type == "Split") return read_split(value);
  return unsupported("a pre-tokenizer of type \"" + type + "\"",
                     "Split, Digits, ByteLevel, Metaspace and Sequences of them are");
}

Status TokenizerJsonReader::read_split(const Json& value) {
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

Status TokenizerJsonReader::read_metaspace(const Json& value) {
  Metaspace metaspace;
  CLO_ASSIGN(metaspace.replacement, text_of(value, "replacement", "a Metaspace pre-tokenizer"));
  if (decode_utf8(metaspace.replacement).length != metaspace.replacement.size())
    return bad("a Metaspace pre-tokenizer: \"replacement\" must be one character, found " +
               shown(member(value, "replacement")));
  CLO_ASSIGN(metaspace.split, flag(value, "split", true));
  const Json& scheme = member(value, "prepend_scheme");
  if (scheme.is_null() || scheme == "always") {
    metaspace.prefix = Metaspace::Prefix::kAlways;
  } else if (scheme == "first") {
    metaspace.prefix = Metaspace::Prefix::kFirst;
  } else if (scheme == "never") {
    metaspace.prefix = Metaspace::Prefix::kNever;
  } else {
    return bad(
        "a Metaspace pre-tokenizer: \"prepend_scheme\" must be \"always\", \"first\" or "
        "\"never\", found " +
        shown(scheme));
  }
  // The older spelling; beside the newer one it may only agree.
  CLO_ASSIGN(const bool prefix_space, flag(value, "add_prefix_space", true));
  if (!prefix_space && metaspace.prefix != Metaspace::Prefix::kNever)
    return bad(
        "a Metaspace pre-tokenizer: \"add_prefix_space\" is false, which needs "
        "\"prepend_scheme\" \"never\", found " +
        shown(scheme));
  parts_->metaspace = std::move(metaspace);
  return Ok{};
}

Status TokenizerJsonReader::read_post_processor(const Json& value, int depth) {
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

Status TokenizerJsonReader::append_special(const Json& special, const Json& processor,
                                           std::vector<int32_t>& ids) {
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

Status TokenizerJsonReader::read_decoder(const Json& value, int depth) {
  if (value.is_null()) return Ok{};
  CLO_ASSIGN(const std::string type, type_of(value, "decoder"));
  if (type == "Sequence") {
    CLO_ASSIGN(const Json* items, list(value, "decoders", depth));
    for (const Json& item : *items) CLO_TRY(read_decoder(item, depth + 1));
    return Ok{};
  }
  return parts_->kind == TokenizerParts::Kind::kByteLevel ? read_byte_level_decoder(type)
                                                          : read_character_decoder(type, value);
}

Status TokenizerJsonReader::read_byte_level_decoder(const std::string& type) {
  if (type == "ByteLevel") {
    byte_level_decoder_ = true;
  } else if (type != "Fuse") {  // Fuse only joins the pieces
    return unsupported("a decoder of type \"" + type + "\" after a ByteLevel pre-tokenizer",
                       "ByteLevel is");
  }
  return Ok{};
}

// Stages in any other order than Replace, ByteFallback, Fuse, Strip would give other texts.
Status TokenizerJsonReader::read_character_decoder(const std::string& type, const Json& value) {
  const auto misplaced = [&](const std::string& before) {
    return unsupported("a decoder of type \"" + type + "\" after " + before,
                       "the order Replace, ByteFallback, Fuse, Strip is");
  };
  if (type == "Replace") {
    if (byte_fallback_decoder_ || fuse_seen_)
      return misplaced(byte_fallback_decoder_ ? "ByteFallback" : "Fuse");
    CLO_ASSIGN(auto texts, read_replace(value, "decoder"));
    replacements_.push_back(std::move(texts));
    return Ok{};
  }
  if (type == "ByteFallback") {
    if (fuse_seen_) return misplaced("Fuse");
    byte_fallback_decoder_ = true;
    return Ok{};
  }
  if (type == "Fuse") {
    fuse_seen_ = true;
    return Ok{};
  }
  if (type != "Strip") {
    return unsupported("a decoder of type \"" + type + "\" without a ByteLevel pre-tokenizer",
                       "Replace, ByteFallback, Fuse and Strip are");
  }
  // Before Fuse it would strip every token, not the text.
  if (!fuse_seen_) return unsupported("a Strip decoder before Fuse", "one after it is");
  if (strip_seen_) return unsupported("a second Strip decoder", "one is");
  strip_seen_ = true;
  const Json& content = member(value, "content");
  const Json& start = member(value, "start");
  const Json& stop = member(value, "stop");
  if (content != " ")
    return unsupported("a Strip decoder of content " + shown(content), "\" \" is");
  if (!start.is_number_unsigned() || start.get<uint64_t>() > kMaxStrip)
    return bad("a Strip decoder: expected a \"start\" from 0 to " + std::to_string(kMaxStrip) +
               ", found " + shown(start));
  if (stop != 0) return unsupported("a Strip decoder with \"stop\" " + shown(stop), "0 is");
  parts_->decode_rules.leading_spaces = start.get<size_t>();
  return Ok{};
}

void TokenizerJsonReader::decode_tokens() {
  parts_->decode_rules.replace_each_byte = true;
  for (auto& token : parts_->tokens) {
    if (!token.present) continue;
    for (const auto& [pattern, content] : replacements_)
      token.bytes = replace_all(token.bytes, pattern, content);
    const int byte = byte_fallback_decoder_ ? byte_of_spelling(token.bytes) : -1;
    if (byte < 0) continue;
    token.bytes = std::string(1, static_cast<char>(byte));
    token.is_byte = true;
  }
}

}  // namespace clo
