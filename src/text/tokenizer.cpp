#include "text/tokenizer.h"

#include <algorithm>
#include <cstdio>

#include "base/try.h"
#include "base/utf8.h"
#include "text/byte_level.h"
#include "text/gguf_pieces.h"
#include "text/gguf_tokenizer.h"
#include "text/tokenizer_config.h"
#include "text/tokenizer_parts.h"

namespace clo {

namespace {

// Words longer than this are merged each time they occur: they hardly ever repeat.
constexpr size_t kMaxCachedWord = 64;
// Positions inside a word are 32-bit.
constexpr size_t kMaxTextBytes = size_t{1} << 30;

// One call of encode(): the ids so far and the words already met.
class Encoding {
 public:
  explicit Encoding(const TokenizerParts& parts) : parts_(parts) {}

  Status add_text(std::string_view text, bool parse_special) {
    std::vector<AddedTokenFinder::Section> sections;
    parts_.raw_finder.split(text, parse_special, sections);
    for (const auto& section : sections) {
      if (section.id >= 0) {
        ids_.push_back(section.id);
      } else {
        CLO_TRY(add_section(section.text, parse_special, section.text.data() == text.data()));
      }
    }
    return Ok{};
  }

  std::vector<TokenId> take() { return std::move(ids_); }

 private:
  // `at_start`: whether the section is where the whole text begins.
  Status add_section(std::string_view text, bool parse_special, bool at_start) {
    for (const NormalizerStep& step : parts_.normalizer) {
      CLO_ASSIGN(std::string normal, apply_step(step, text));
      text = keep(std::move(normal));
    }
    if (parts_.normal_finder.empty()) return add_plain(text, at_start);
    std::vector<AddedTokenFinder::Section> sections;
    parts_.normal_finder.split(text, parse_special, sections);
    for (const auto& section : sections) {
      if (section.id >= 0) {
        ids_.push_back(section.id);
      } else {
        CLO_TRY(add_plain(section.text, at_start && section.text.data() == text.data()));
      }
    }
    return Ok{};
  }

  Status add_plain(std::string_view text, bool at_start) {
    std::vector<std::string_view> pieces = {text}, parts;
    for (size_t i = 0; i <= parts_.splits.size(); ++i) {
      if (i == parts_.splits_before_prefix_space && parts_.add_prefix_space) {
        for (std::string_view& piece : pieces) {
          if (piece.starts_with(' ')) continue;
          std::string spaced(1, ' ');
          spaced += piece;
          piece = keep(std::move(spaced));
        }
      }
      if (i == parts_.splits.size()) break;
      parts.clear();
      for (const std::string_view piece : pieces) CLO_TRY(parts_.splits[i].split(piece, parts));
      pieces.swap(parts);
    }
    for (const std::string_view piece : pieces) {
      if (parts_.metaspace) {
        add_metaspace(*parts_.metaspace, piece, at_start);
      } else {
        add_word(piece);
      }
      at_start = false;
    }
    return Ok{};
  }

  void add_metaspace(const Metaspace& metaspace, std::string_view text, bool at_start) {
    std::string spaced = replace_all(text, " ", metaspace.replacement);
    const bool prefixed = metaspace.prefix == Metaspace::Prefix::kAlways ||
                          (metaspace.prefix == Metaspace::Prefix::kFirst && at_start);
    if (prefixed && !spaced.starts_with(metaspace.replacement))
      spaced.insert(0, metaspace.replacement);
    std::string_view rest = keep(std::move(spaced));
    while (metaspace.split && !rest.empty()) {
      const size_t end = std::min(rest.find(metaspace.replacement, 1), rest.size());
      add_word(rest.substr(0, end));
      rest.remove_prefix(end);
    }
    if (!rest.empty()) add_word(rest);
  }

  void add_word(std::string_view word) {
    const bool cached = word.size() <= kMaxCachedWord;
    if (cached) {
      const auto known = words_.find(word);
      if (known != words_.end()) {
        for (size_t i = 0; i < known->second.count; ++i)
          ids_.push_back(TokenId{ids_[known->second.begin + i]});
        return;
      }
    }
    const size_t begin = ids_.size();
    append_tokens(word);
    if (cached) words_.emplace(word, Place{begin, ids_.size() - begin});
  }

  void append_tokens(std::string_view word) {
    const bool byte_level = parts_.kind == TokenizerParts::Kind::kByteLevel;
    if (parts_.ignore_merges) {
      const int32_t whole =
          byte_level ? parts_.model_token(spell_bytes(word)) : parts_.model_token(word);
      if (whole >= 0) return ids_.push_back(whole);
    }
    if (parts_.kind == TokenizerParts::Kind::kPieces) {
      parts_.pieces.encode(word, piece_scratch_, ids_);
    } else if (byte_level) {
      parts_.bpe.encode(word, scratch_, ids_);
    } else {
      set_characters(word);
      parts_.bpe.merge(characters_, scratch_, ids_);
    }
  }

  // The tokens that a word starts from, into characters_.
  void set_characters(std::string_view word) {
    characters_.clear();
    bool after_unknown = false;
    while (!word.empty()) {
      const std::string_view character = word.substr(0, decode_utf8(word).length);
      word.remove_prefix(character.size());
      const int32_t token = parts_.model_token(character);
      const bool unknown = token < 0 && !parts_.byte_fallback;
      if (token >= 0) {
        characters_.push_back(token);
      } else if (parts_.byte_fallback) {
        for (const char byte : character)
          characters_.push_back(parts_.fallback_tokens[static_cast<unsigned char>(byte)]);
      } else if (parts_.unknown >= 0 && !(parts_.fuse_unknown && after_unknown)) {
        characters_.push_back(parts_.unknown);
      }
      after_unknown = unknown;
    }
  }

  // Holds a string for as long as the pieces and cached words that point into it.
  std::string_view keep(std::string text) { return kept_.emplace_back(std::move(text)); }

  struct Place {
    size_t begin, count;  // of a word's ids in ids_
  };
  const TokenizerParts& parts_;
  std::vector<TokenId> ids_;
  std::unordered_map<std::string_view, Place> words_;
  std::deque<std::string> kept_;
  BpeMerger::Scratch scratch_;
  PieceMerger::Scratch piece_scratch_;
  std::vector<int32_t> characters_;
};

bool begins_with(const std::vector<TokenId>& ids, const std::vector<TokenId>& prefix) {
  return ids.size() >= prefix.size() && std::equal(prefix.begin(), prefix.end(), ids.begin());
}

struct KnownPattern {
  std::string_view name, source;
};
// Only names for description(); nothing depends on them.
constexpr KnownPattern kKnownPatterns[] = {
    {"GPT-2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {"Llama-3",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {"Qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
};

std::string name_pattern(const std::string& source) {
  for (const KnownPattern& known : kKnownPatterns)
    if (known.source == source) return std::string(known.name) + " (" + source + ")";
  std::string shown;
  for (const char c : source) {
    if (static_cast<unsigned char>(c) >= 0x20) {
      shown += c;
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\x%02X", static_cast<unsigned>(c));
    shown += escaped;
  }
  return "of the file (" + shown + ")";
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<const TokenizerParts> parts) : parts_(std::move(parts)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::parse(std::string_view tokenizer_json, std::string where) {
  CLO_ASSIGN(std::unique_ptr<TokenizerParts> parts, read_tokenizer_json(tokenizer_json, where));
  return Tokenizer(std::move(parts));
}

Result<Tokenizer> Tokenizer::from_gguf(const GgufFile& file) {
  CLO_ASSIGN(const std::string kind, file.text("tokenizer.ggml.model"));
  if (kind == "llama") {
    CLO_ASSIGN(std::unique_ptr<TokenizerParts> parts, read_gguf_pieces(file));
    return Tokenizer(std::move(parts));
  }
  CLO_ASSIGN(const std::string json, gguf_tokenizer_json(file));
  return parse(json, file.where());
}

Result<Tokenizer> Tokenizer::load(const ModelFiles& model) {
  return model.gguf() ? from_gguf(*model.gguf()) : load(model.path());
}

Result<Tokenizer> Tokenizer::load(const std::filesystem::path& model_dir) {
  const auto path = model_dir / "tokenizer.json";
  CLO_ASSIGN(const auto text, read_text_file(path));
  if (!text) {
    std::error_code ignored;
    if (std::filesystem::exists(model_dir / "tokenizer.model", ignored)) {
      return Error{ErrorCode::kUnsupported,
                   "the model has a SentencePiece tokenizer (tokenizer.model) and no "
                   "tokenizer.json, which is what is read; transformers makes one: "
                   "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
                   model_dir.string()};
    }
    return Error{ErrorCode::kBadFile,
                 "not found: a model directory needs its tokenizer.json (download it from where "
                 "the weights came from)",
                 path.string()};
  }
  CLO_ASSIGN(std::unique_ptr<TokenizerParts> parts, read_tokenizer_json(*text, path.string()));
  CLO_ASSIGN(const TokenizerConfig config, load_tokenizer_config(model_dir));
  if (config.add_bos_token && parts->prefix.empty()) {
    const auto bos = config.special_tokens.find("bos_token");
    const auto id =
        bos == config.special_tokens.end() ? parts->ids.end() : parts->ids.find(bos->second);
    if (id == parts->ids.end()) {
      return Error{ErrorCode::kBadFile,
                   "add_bos_token is true, but bos_token " +
                       (bos == config.special_tokens.end()
                            ? "is not set"
                            : "\"" + bos->second + "\" is not a token of tokenizer.json"),
                   (model_dir / "tokenizer_config.json").string()};
    }
    parts->prefix.push_back(id->second);
    parts->post_processor += ", add_bos_token " + bos->second;
  }
  return Tokenizer(std::move(parts));
}

Result<std::vector<TokenId>> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  if (text.size() > kMaxTextBytes) {
    return Error{ErrorCode::kTooLong,
                 "a text of " + std::to_string(text.size()) + " bytes; at most 1 GiB is encoded",
                 "text"};
  }
  const size_t invalid = find_invalid_utf8(text);
  if (invalid < text.size()) {
    char byte[8];
    std::snprintf(byte, sizeof byte, "0x%02X", static_cast<unsigned char>(text[invalid]));
    return Error{ErrorCode::kBadRequest,
                 "expected UTF-8, found an invalid sequence at byte " + std::to_string(invalid) +
                     " (" + byte + "): convert the text to UTF-8",
                 "text"};
  }
  Encoding encoding(*parts_);
  CLO_TRY(encoding.add_text(text, options.parse_special));
  std::vector<TokenId> ids = encoding.take();
  if (options.add_special_tokens) {
    if (!begins_with(ids, parts_->prefix))
      ids.insert(ids.begin(), parts_->prefix.begin(), parts_->prefix.end());
    ids.insert(ids.end(), parts_->suffix.begin(), parts_->suffix.end());
  }
  return ids;
}

std::string Tokenizer::decode_bytes(TokenId id) const {
  return contains(id) ? parts_->tokens[static_cast<size_t>(id)].bytes : std::string();
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  const DecodeRules& rules = parts_->decode_rules;
  std::string text, run;  // a run of bytes that may spell characters together
  const auto end_run = [&] {
    std::string_view rest = run;
    while (!rest.empty()) {
      const Utf8Step step = decode_utf8(rest);
      if (step.kind == Utf8Step::Kind::kCodePoint) {
        text += rest.substr(0, step.length);
      } else {
        for (size_t i = 0; i < (rules.replace_each_byte ? step.length : 1); ++i)
          text += kReplacementCharacter;
      }
      rest.remove_prefix(step.length);
    }
    run.clear();
  };
  for (const TokenId id : ids) {
    if (!contains(id) || (skip_special && is_special(id))) continue;
    if (may_be_partial(id)) {
      run += decode_bytes(id);
    } else {
      end_run();
      text += decode_bytes(id);
    }
  }
  end_run();
  size_t spaces = 0;
  while (spaces < rules.leading_spaces && text.substr(spaces, 1) == " ") ++spaces;
  return text.substr(spaces);
}

bool Tokenizer::may_be_partial(TokenId id) const {
  return contains(id) && (parts_->kind == TokenizerParts::Kind::kByteLevel ||
                          parts_->tokens[static_cast<size_t>(id)].is_byte);
}

const DecodeRules& Tokenizer::decode_rules() const { return parts_->decode_rules; }

bool Tokenizer::is_special(TokenId id) const {
  return contains(id) && parts_->tokens[static_cast<size_t>(id)].special;
}

bool Tokenizer::contains(TokenId id) const { return parts_->contains(id); }

std::optional<TokenId> Tokenizer::find(std::string_view content) const {
  const auto found = parts_->ids.find(content);
  if (found == parts_->ids.end()) return std::nullopt;
  return found->second;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(parts_->tokens.size()); }

std::string Tokenizer::description() const {
  std::string patterns, steps;
  for (const SplitPattern& split : parts_->splits)
    patterns += (patterns.empty() ? "" : " then ") + name_pattern(split.source());
  for (const NormalizerStep& step : parts_->normalizer)
    steps += (steps.empty() ? "" : ", ") + std::string(step_name(step));
  const std::string tokens = ", " + std::to_string(parts_->ids.size()) + " tokens, ";
  std::string text;
  if (parts_->kind == TokenizerParts::Kind::kByteLevel) {
    text = "byte-level BPE" + tokens + "split pattern " + (patterns.empty() ? "none" : patterns) +
           (parts_->add_prefix_space ? " after a prefix space" : "") + ", ";
  } else {
    text = std::string("SentencePiece BPE") +
           (parts_->kind == TokenizerParts::Kind::kPieces ? " by scores" : "") + tokens +
           (parts_->byte_fallback ? "byte fallback, " : "no byte fallback, ") +
           (patterns.empty() ? "" : "split pattern " + patterns + ", ") +
           (parts_->metaspace ? "Metaspace, " : "");
  }
  return text + std::to_string(parts_->added.size()) + " added, normaliser " +
         (steps.empty() ? "none" : steps) + ", post-processor " + parts_->post_processor +
         (parts_->num_dropped_bytes == 0 ? ""
                                         : ", " + std::to_string(parts_->num_dropped_bytes) +
                                               " bytes without a token, which are dropped");
}

}  // namespace clo
